"""A merge on local disks: whole or not at all, and never where it should not be."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
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


@pytest.mark.parametrize("below", ["", "out", "pytorch_model_fsdp_0/out"])
def test_nothing_is_written_into_a_checkpoint(nodes: tuple[Path, ...], below: str) -> None:
    for node in nodes:
        refused(ConfigError, "inside|exists", nodes, node / below)
        (node.parent / "link").symlink_to(node)
        refused(ConfigError, "inside|exists", nodes, node.parent / "link" / below)


def test_a_missing_shard_and_a_missing_node_are_incomplete(
    nodes: tuple[Path, ...], out: Path
) -> None:
    refused(Incomplete, r"\.metadata: not found", nodes[1:], out)
    refused(Incomplete, "__2_0.distcp and 1 more", nodes[:1], out)
    (nodes[0] / SHARD).unlink()
    refused(Incomplete, f"{SHARD}: not found", nodes, out)


def test_a_shard_of_another_size_is_corrupt(nodes: tuple[Path, ...], out: Path) -> None:
    with (nodes[0] / SHARD).open("ab") as file:
        file.write(b"x")
    refused(Corrupt, "expected by the metadata", nodes, out)
    os.truncate(nodes[0] / SHARD, 100)
    refused(Corrupt, "100 bytes", nodes, out)


def test_a_link_in_place_of_a_shard_is_not_followed(nodes: tuple[Path, ...], out: Path) -> None:
    (nodes[0] / SHARD).rename(out.parent / "elsewhere")
    (nodes[0] / SHARD).symlink_to(out.parent / "elsewhere")
    refused(Incomplete, f"{SHARD}: not found", nodes, out)


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
    saved_now(nodes[1])
    merge_local(nodes, out, KEEP)
    shutil.rmtree(out)
    data[-2000] ^= 1
    (nodes[1] / SHARD).write_bytes(data)
    saved_now(nodes[1])
    refused(Corrupt, "differs between the directories", nodes, out)


def saved_now(node: Path) -> None:
    for path in node.rglob("*"):
        path.touch()


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


@pytest.fixture
def umask() -> Iterator[None]:
    was = os.umask(0o022)
    yield
    os.umask(was)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize(
    ("mask", "file", "directory"),
    [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0o077, 0o600, 0o700)],
)
def test_modes_follow_the_umask(
    nodes: tuple[Path, ...], out: Path, mask: int, file: int, directory: int
) -> None:
    os.umask(mask)
    merge_local(nodes, out, MergeOptions("keep", 20_000), ROOT / "base")
    assert out.stat().st_mode & 0o777 == directory
    assert {p.stat().st_mode & 0o777 for p in out.iterdir()} == {file}


def test_configuration_comes_from_what_was_given_then_the_checkpoint_then_around_it(
    nodes: tuple[Path, ...], out: Path
) -> None:
    given = out.parent / "given"
    given.mkdir()
    places = [(nodes[0].parent, "run"), (nodes[0], "checkpoint"), (given, "given")]
    for name, last in [
        ("config.json", 3),
        ("generation_config.json", 2),
        ("tokenizer_config.json", 1),
    ]:
        for place, word in places[:last]:
            (place / name).write_text(f'"{word}"')
    merge_local(
        (nodes[0] / "pytorch_model_fsdp_0", nodes[1] / "pytorch_model_fsdp_0"), out, KEEP, given
    )
    found = {
        name: json.loads((out / name).read_text())
        for name in ("config.json", "generation_config.json", "tokenizer_config.json")
    }
    assert found == {
        "config.json": "given",
        "generation_config.json": "checkpoint",
        "tokenizer_config.json": "run",
    }


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


def python(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT.parent.parent, timeout=300, check=False
    )


MEASURED = """
    import sys
    from pathlib import Path
    from tests.support.merge_in_memory import consolidate
    from ckptsync.merger.plan import MergeOptions
    from ckptsync.stores.checkpoint_files import DirectoryFiles
    written = 0
    def write(name, chunks):
        global written
        for chunk in chunks:
            written += len(chunk)
    consolidate(DirectoryFiles(sys.argv[1]), write, MergeOptions(sys.argv[2]))
    # ru_maxrss would count the process that started this one too
    status = Path("/proc/self/status").read_text()
    print(written, status.partition("VmHWM:")[2].split()[0])
"""


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """600 MB in a sparse file: one tensor of 300 MB, and many."""
    rows = {
        "embed": ("F32", (75_000, 1000), b""),
        **{str(n): ("F32", (300, 2500), b"") for n in range(100)},
    }
    at, header = 0, {}
    for name, (kind, shape, _) in rows.items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    (tmp_path / "model.safetensors").write_bytes(raw_safetensors(header, b""))
    os.truncate(
        tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size + at
    )
    done = python(MEASURED, tmp_path, "bf16")
    written, peak = map(int, done.stdout.split())
    assert at == 600_000_000
    assert written > at // 2
    assert peak < 150_000  # kilobytes


@pytest.mark.parametrize(
    "content", [b"", bytes(20), b'{"a": 1', b"[" * 5000, b'{"a": "' + b"x" * (2 << 20)]
)
def test_a_damaged_configuration_is_corrupt_and_named(
    nodes: tuple[Path, ...], out: Path, content: bytes
) -> None:
    for name in ("config.json", "tokenizer.json"):
        (nodes[0] / name).write_bytes(content)
        refused(Corrupt, f"{name}: not JSON", nodes, out)
        (nodes[0] / name).write_bytes(b'{"model": "' + b"x" * (2 << 20) + b'"}\n')
    merge_local(nodes, out, KEEP)


def test_a_link_to_itself_is_no_directory(nodes: tuple[Path, ...], out: Path) -> None:
    (out.parent / "loop").symlink_to("loop")
    refused(ConfigError, "a checkpoint's directory expected", (out.parent / "loop",), out)
    refused(ConfigError, "exists", nodes, out.parent / "loop")


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
