"""A snapshot is of one state of the files, or it is none."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from ckptsync.checkpoint_dirs import CheckpointDir, find_checkpoint_dirs, list_checkpoint
from ckptsync.errors import Corrupt, Incomplete
from ckptsync.records.manifest import Manifest
from ckptsync.spool.markers import PinNotes, TrainingProcess, process_path, write_mark
from ckptsync.spool.pins import create_pin, link_files, list_pins
from ckptsync.stores.memory import MemoryStore
from ckptsync.walk import SPOOL
from ckptsync.worker.local_save import (
    LATER,
    Changed,
    LocalFiles,
    LocalSave,
    ReadFiles,
    build_local_save,
    check_unchanged,
    draft_manifest,
    open_each,
)
from ckptsync.worker.upload import send_save
from ckptsync.worker.upload_sources import UploadSource
from tests.support.files_in_memory import safetensors_file
from tests.support.vector import vector
from tests.support.worker_in_process import T, context, draft_of, lay, manifests, seen


def list_local_files(path: Path) -> LocalFiles:
    (checkpoint_dir,) = find_checkpoint_dirs(path)
    return build_local_save("run", checkpoint_dir, list_checkpoint(checkpoint_dir)).files


def drafted(path: Path, read: ReadFiles | None = None) -> tuple[Manifest, tuple[str, ...]]:
    (checkpoint_dir,) = find_checkpoint_dirs(path)
    local_save = LocalSave("run", checkpoint_dir, list_local_files(path), None)
    return draft_manifest(local_save, "n0", PinNotes(), read or ReadFiles(), clock_offset=0)


def test_without_marks_the_training_says_how_many_ranks_have_states(tmp_path: Path) -> None:
    states = ("optimizer.pt", "scheduler.pt", "trainer_state.json", "rng_state_0.pth")
    model = safetensors_file({"w": ("U8", (1,), b"x")})
    lay(tmp_path, {"model.safetensors": model, **dict.fromkeys(states, b"{}")}, at=50.0)
    for name, began, left, world in (
        ("hook", 40.0, 0.0, 4),
        ("ended", 41.0, 49.0, 16),
        ("later", 60.0, 0.0, 8),
        ("resume-7-8", 30.0, 0.0, 1),
    ):
        mark = TrainingProcess("t", 0, world, 1, "h", 1, "1", "b", T / 1e9 + began)
        mark = replace(mark, left=left and T / 1e9 + left)
        write_mark(process_path(tmp_path / SPOOL, name), mark)
    store = MemoryStore()
    send_save(seen(tmp_path), PinNotes(), replace(context(store), output_dir=tmp_path), ReadFiles())
    [manifest] = manifests(store)
    assert {f"rng_state_{rank}.pth" for rank in range(4)} <= manifest.manifest.demands.resume.keys()
    assert "rng_state_4.pth" not in manifest.manifest.demands.resume


def sent(path: Path, hold: LocalFiles) -> Manifest:
    (checkpoint_dir,) = find_checkpoint_dirs(path)
    return draft_of(LocalSave("run", checkpoint_dir, hold, None))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    shutil.copytree(vector("hf-zero3-2node").sources[0].parent, tmp_path / "out")
    return tmp_path / "out"


def test_a_take_of_a_real_checkpoint_says_all_that_a_manifest_needs(out: Path) -> None:
    read = ReadFiles()
    taken, _ = drafted(out, read)
    assert {f.digest for f in taken.files} == {""}
    read.entries.update(
        {
            path: UploadSource(file, "n0").digested()
            for path, file in list_local_files(out).by_path.items()
        }
    )
    taken, _ = drafted(out, read)
    files = {
        p.relative_to(out / "checkpoint-4").as_posix(): p
        for p in (out / "checkpoint-4").rglob("*")
        if p.is_file()
    }
    assert {f.path: (f.size, f.digest, f.mtime) for f in taken.files} == {
        name: (p.stat().st_size, blake3(p.read_bytes()).hexdigest(), p.stat().st_mtime_ns)
        for name, p in files.items()
    }
    assert taken.ranks == (0, 1)
    assert taken.sources == ("zero:global_step4",)
    assert len(taken.demands.model) == 4 * 2
    assert (taken.started, taken.ended) == (
        min(f.mtime for f in taken.files),
        max(f.mtime for f in taken.files),
    )


def written_in_location(path: Path) -> None:
    with path.open("r+b") as f:
        f.write(b"X")


def test_a_change_whose_time_was_set_back_is_seen_and_a_pin_or_rotation_is_none(out: Path) -> None:
    path = out / "checkpoint-4" / "latest"
    seen, times = list_local_files(out), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    os.link(path, out / "pin")
    check_unchanged(seen)
    (out / "pin").unlink()
    written_in_location(path)
    os.utime(path, ns=times)
    with pytest.raises(Changed, match="latest: changed"):
        check_unchanged(seen)


@pytest.mark.parametrize("name", ["a\nb", "a\\b", b"\xff\xfe".decode("utf-8", "surrogateescape")])
def test_a_name_that_no_store_can_keep_is_refused_by_name(out: Path, name: str) -> None:
    (out / "checkpoint-4" / name).write_text("x")
    with pytest.raises(Corrupt, match="has characters"):
        drafted(out)


def test_metadata_that_is_broken_is_taken_with_a_note(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4" / "pytorch_model_fsdp_0"
    folder.mkdir(parents=True)
    (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'echo PWNED'\ntR.")
    (folder / "__0_0.distcp").touch()
    taken, notes = drafted(tmp_path)
    assert len(taken.files) == 2
    assert taken.demands.model == {}
    assert notes


def two_files(tmp_path: Path) -> LocalFiles:
    (tmp_path / "checkpoint-4").mkdir()
    for name in ("a", "b"):
        (tmp_path / "checkpoint-4" / name).write_text(name * 3)
    pin = create_pin(tmp_path, "checkpoint-4", 0, "n0")
    assert pin is not None
    link_files(pin, tmp_path / "checkpoint-4", ["a"])
    (checkpoint_dir,) = find_checkpoint_dirs(tmp_path)
    return build_local_save(
        "run", checkpoint_dir, list_checkpoint(checkpoint_dir), list_pins(tmp_path)[0]
    ).files


def test_what_is_pinned_is_read_from_the_pin_and_the_rest_is_not(tmp_path: Path) -> None:
    both = two_files(tmp_path)
    assert (both.unpinned, both.is_gone, dict(both.sizes())) == (("b",), False, {"a": 3, "b": 3})
    shutil.rmtree(tmp_path / "checkpoint-4")
    out = bytearray(2)
    both.read_into("a", 1, memoryview(out))
    assert out == b"aa"
    with pytest.raises(Incomplete):
        both.read_into("b", 0, memoryview(out))
    checkpoint_dir = CheckpointDir("checkpoint-4", "trainer", tmp_path / "checkpoint-4")
    assert build_local_save("run", checkpoint_dir, None, list_pins(tmp_path)[0]).files.is_gone


def test_who_opens_each_is_told_which_one_is_gone(tmp_path: Path) -> None:
    both = two_files(tmp_path)
    (tmp_path / "checkpoint-4" / "b").unlink()
    with pytest.raises(Incomplete, match="checkpoint-4/b: gone") as caught:
        list(open_each(both.by_path.values()))
    assert caught.value.hint == LATER
    shutil.rmtree(tmp_path)
    with pytest.raises(Incomplete, match="a: gone"):
        list(open_each(both.by_path.values()))


def test_reading_past_the_end_or_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    both = two_files(tmp_path)
    with pytest.raises(Corrupt, match="ends at byte 3"):
        both.read_into("a", 2, memoryview(bytearray(2)))
    with pytest.raises(Incomplete, match="not in"):
        both.read_into("c", 0, memoryview(bytearray(1)))
