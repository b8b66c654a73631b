"""A merge on local disks: whole or not at all, and never where it should not be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, Incomplete, StoreError
from ckptsync.merger.plan import MergeOptions
from tests.support.files_in_memory import raw_safetensors
from tests.support.merge_on_disk import merge_local, merge_prepared, prepare_local
from tests.support.vector import ROOT, bits, vector

KEEP = MergeOptions("keep")
TWO_NODES = vector("hf-fsdp2-2node")
SHARD = "pytorch_model_fsdp_0/__0_0.distcp"


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, ...]:
    """The directories of two nodes, free to be damaged."""
    return tuple(
        Path(shutil.copytree(source, tmp_path / f"node{n}" / "checkpoint-4"))
        for n, source in enumerate(TWO_NODES.sources)
    )


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "space").mkdir()
    return tmp_path / "space" / "out"


def refused(
    error: type[CkptsyncError],
    match: str,
    sources: tuple[Path, ...],
    out: Path,
    config: Path | None = None,
) -> None:
    """It raises, and nothing is there that was not there before: no output, no work directory."""
    before = sorted(out.parent.rglob("*")) if out.parent.exists() else None
    with pytest.raises(error, match=match):
        merge_local(sources, out, KEEP, config)
    assert (sorted(out.parent.rglob("*")) if out.parent.exists() else None) == before


def test_a_file_or_a_link_in_the_way_is_left_alone(nodes: tuple[Path, ...], out: Path) -> None:
    out.write_text("precious")
    refused(ConfigError, "exists", nodes, out)
    for target in ("nowhere", nodes[0]):
        out.unlink()
        out.symlink_to(target)
        refused(ConfigError, "exists", nodes, out)
    out.unlink()
    out.mkdir()
    (out / "model.safetensors").write_text("precious")
    refused(ConfigError, "exists", nodes, out)


def test_an_empty_directory_is_filled_and_missing_parents_are_made(
    nodes: tuple[Path, ...], out: Path
) -> None:
    out.mkdir()
    merge_local(nodes, out, KEEP)
    merge_local(nodes, out.parent / "a" / "b" / "out", KEEP)
    (out.parent / "link").symlink_to("a")
    merge_local(nodes, out.parent / "link" / "out", KEEP)
    for place in (out, out.parent / "a" / "b" / "out", out.parent / "a" / "out"):
        assert bits(place / "model.safetensors") == bits(TWO_NODES.keep)
    assert sorted(p.name for p in out.parent.iterdir()) == ["a", "link", "out"]
    assert out.stat().st_mode == out.parent.stat().st_mode


@pytest.mark.parametrize("below", ["", "out", "pytorch_model_fsdp_0/out"])
def test_nothing_is_written_into_a_checkpoint(nodes: tuple[Path, ...], below: str) -> None:
    for node in nodes:
        refused(ConfigError, "inside|exists", nodes, node / below)
        (node.parent / "link").symlink_to(node)
        refused(ConfigError, "inside|exists", nodes, node.parent / "link" / below)


def test_configuration_behind_a_link_is_not_followed(nodes: tuple[Path, ...], out: Path) -> None:
    (out.parent / "secret").write_text("{}")
    (nodes[0] / "tokenizer.json").symlink_to(out.parent / "secret")
    (nodes[0].parent / "config.json").symlink_to(out.parent / "secret")
    merge_local(nodes, out, KEEP)
    assert [p.name for p in out.iterdir()] == ["model.safetensors"]


def test_two_nodes_with_different_bytes_for_one_shard_hold_two_saves(
    nodes: tuple[Path, ...], out: Path
) -> None:
    data = bytearray((nodes[0] / SHARD).read_bytes())
    (nodes[1] / SHARD).write_bytes(data)
    prepare_local(nodes, out, KEEP, use_times=False)
    data[-2000] ^= 1
    (nodes[1] / SHARD).write_bytes(data)
    with pytest.raises(Corrupt, match="differs between the directories"):
        prepare_local(nodes, out, KEEP, use_times=False)


@pytest.mark.parametrize("change", ["touch", "append", "replace", "delete"])
def test_a_source_that_changes_during_the_merge_leaves_nothing(
    nodes: tuple[Path, ...], out: Path, change: str
) -> None:
    (nodes[1] / "trainer_state.json").touch()
    shard = nodes[1] / "trainer_state.json" if change == "delete" else nodes[0] / SHARD

    def trainer(done: int, total: int) -> None:
        if change == "append":
            shard.write_bytes(shard.read_bytes() + b"x")
        elif change == "replace":
            (shard.parent / "new").write_bytes(shard.read_bytes())
            (shard.parent / "new").replace(shard)
        elif change == "touch":
            os.utime(shard, (1, 1))
        else:
            shard.unlink(missing_ok=True)

    with pytest.raises(Incomplete, match="changed while it was read"):
        merge_local(nodes, out, KEEP, progress=trainer)
    assert not list(out.parent.iterdir())


def test_whatever_stops_a_merge_leaves_nothing(nodes: tuple[Path, ...], out: Path) -> None:
    def stop(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge_local(nodes, out, KEEP, progress=stop)
    assert not list(out.parent.iterdir())


def test_the_name_of_a_model_survives_a_power_cut(
    nodes: tuple[Path, ...], out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, bool]] = []
    fsync = os.fsync

    def noted(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").readlink(), out.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noted)
    merge_local(nodes, out, KEEP)
    assert (out.parent, True) in synced


def test_nothing_is_written_elsewhere_where_another_directory_takes_the_name_meanwhile(
    nodes: tuple[Path, ...], out: Path
) -> None:
    elsewhere = out.parent / "elsewhere"
    elsewhere.mkdir()

    def swapped(_done: int, _total: int) -> None:
        # as whoever owns the directory above may
        for work in out.parent.glob(f".{out.name}.ckptsync-*"):
            if not work.is_symlink() and not (out.parent / "aside").exists():
                work.rename(out.parent / "aside")
                work.symlink_to(elsewhere)

    merge_local(nodes, out, MergeOptions(max_shard_size=1), progress=swapped)
    assert (out.parent / "aside/model.safetensors.index.json").exists()
    assert not list(elsewhere.iterdir())


def test_a_destination_that_appears_meanwhile_is_left_alone(
    nodes: tuple[Path, ...], out: Path
) -> None:
    prepared = prepare_local(nodes, out, KEEP)
    out.mkdir()
    (out / "mine").write_text("precious")
    with pytest.raises(StoreError):
        merge_prepared(prepared)
    assert [p.name for p in out.parent.rglob("*")] == ["out", "mine"]


def test_configuration_comes_from_what_was_given_then_the_checkpoint_then_around_it(
    nodes: tuple[Path, ...], out: Path
) -> None:
    given = out.parent / "given"
    given.mkdir()
    places = {"run": nodes[0].parent, "checkpoint": nodes[0], "given": given}
    names = {"config.json": "given", "generation_config.json": "checkpoint"}
    names["tokenizer_config.json"] = "run"
    for name, last in names.items():
        for word, place in places.items():
            (place / name).write_text(f'"{word}"')
            if word == last:
                break
    merge_local([node / "pytorch_model_fsdp_0" for node in nodes], out, KEEP, given)
    assert {name: json.loads((out / name).read_text()) for name in names} == names


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_a_configuration_is_written_as_it_was_looked_through_for_code(
    nodes: tuple[Path, ...], out: Path, name: str
) -> None:
    around = nodes[0].parent / name
    code = json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "modeling_x.X"}})
    around.write_text('{"model_type": "llama"}'.ljust(len(code)))
    prepared = prepare_local(nodes, out, KEEP)
    around.write_text(code)
    merge_prepared(prepared)
    assert json.loads((out / name).read_text()) == {"model_type": "llama"}


def test_a_place_for_configuration_that_is_not_there_is_said(
    nodes: tuple[Path, ...], out: Path
) -> None:
    refused(ConfigError, "no such", nodes, out, out.parent / "absent")
    refused(ConfigError, "no such", (out.parent / "absent",), out)


MEASURED = """
import sys
from pathlib import Path
from tests.support.merge_in_memory import consolidate
from ckptsync.merger.plan import MergeOptions
from ckptsync.stores.checkpoint_files import DirectoryFiles
def write(name, chunks):
    print(sum(map(len, chunks)))
consolidate(DirectoryFiles(sys.argv[1]), write, MergeOptions("bf16"))
# ru_maxrss would count the process that started this one too
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """360 MB in a sparse file: one tensor of 180 MB, and many."""
    shapes = {"embed": (45_000, 1000), **{str(n): (300, 2500) for n in range(60)}}
    size, header = 0, {}
    for name, (rows, columns) in shapes.items():
        end = size + 4 * rows * columns
        header[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [size, end]}
        size = end
    path = tmp_path / "model.safetensors"
    path.write_bytes(raw_safetensors(header, b""))
    os.truncate(path, path.stat().st_size + size)
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, cwd=ROOT.parent.parent, check=True).stdout
    written, peak = map(int, out.split())
    assert size == 360_000_000
    assert written > size // 2
    assert peak < 150_000  # kilobytes


DAMAGED = [b"", bytes(20), b'{"a": 1', b"[" * 5000, b'{"a": "' + b"x" * (2 << 20)]


def test_a_damaged_configuration_is_corrupt_and_named(nodes: tuple[Path, ...], out: Path) -> None:
    large = b'{"model": "' + b"x" * (2 << 20) + b'"}\n'
    for content in DAMAGED:
        for name in ("config.json", "tokenizer.json"):
            (nodes[0] / name).write_bytes(content)
            refused(Corrupt, f"{name}: not JSON", nodes, out)
            (nodes[0] / name).write_bytes(large)
    merge_local(nodes, out, KEEP)


def test_a_full_disk_is_said_of_the_directory_that_was_named(
    nodes: tuple[Path, ...], out: Path
) -> None:
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    # EFBIG is as near to a full disk as any user can come
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))
    try:
        refused(StoreError, f"^{out}/model.safetensors: ", nodes, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)


def test_what_a_killed_merge_left_is_named(nodes: tuple[Path, ...], out: Path) -> None:
    left = out.parent / f".{out.name}.ckptsync-0123abcd"
    for path in (left, out.parent / f".{out.name}er.ckptsync-0123abcd"):
        path.mkdir()
    merged = merge_local(nodes, out, KEEP)
    assert [note for note in merged.notes if "killed" in note] == [
        f"{left}: left by a merge that was killed; delete it, unless that merge still runs"
    ]
