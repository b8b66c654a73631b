"""What the public command says where a store refuses: one line that names the store and the path,
one that says what helps, no secret.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ckptsync
from tests.support.command_line import Cli
from tests.support.refused_commands import refused
from tests.support.small_disk import on_a_small_disk

FSDP = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2"
SHARDS = [FSDP / node / "checkpoint-4" for node in ("node0", "node1")]
NODE = ("--run", "demo", "--node", "n0")
READING = (("ls", "--store"), ("verify", "--store"), ("inspect",))


@pytest.fixture
def store(tmp_path: Path, cli: Cli) -> Path:
    """A store with half a checkpoint."""
    url = tmp_path / "store"
    cli("push", FSDP / "node0", "--store", url, *NODE)
    return url


@contextmanager
def forbidden(path: Path, mode: int) -> Iterator[None]:
    before = path.stat().st_mode
    path.chmod(mode)
    try:
        yield
    finally:
        path.chmod(before)


@pytest.mark.parametrize("part", ["", "demo"])
@pytest.mark.parametrize("command", READING)
def test_a_store_that_may_not_be_read(store: Path, command: tuple[str, ...], part: str) -> None:
    with forbidden(store / part, 0o000):
        said = refused(*command, store, code=4, names=[store, part, "permission denied"])
    assert "hint: " in said


def test_a_location_that_may_not_be_written_to(store: Path, tmp_path: Path) -> None:
    push = f"push {FSDP}/node0 --store"
    for directory, command, name in (
        (store, f"{push} {store} --run other", "other/"),
        (tmp_path, f"{push} {tmp_path}/new", "new"),
        (tmp_path, f"merge {SHARDS[0]} {SHARDS[1]} {tmp_path}/out", ""),
    ):
        with forbidden(directory, 0o555):
            said = refused(*command.split(), code=4, names=[directory, name, "permission denied"])
        assert "hint: " in said


@pytest.mark.parametrize("command", [*READING, ("verify",), ("merge",)])
def test_a_store_that_is_not_there(tmp_path: Path, command: tuple[str, ...]) -> None:
    absent, out = tmp_path / "absent", [tmp_path / "out"] * (command == ("merge",))
    refused(*command, absent, *out, code=2, names=[absent, "no such directory"])


@pytest.mark.parametrize("command", [("ls",), ("push", FSDP / "node0")])
def test_a_store_whose_path_is_not_utf_8(tmp_path: Path, command: tuple[str | Path, ...]) -> None:
    """As of a directory that an old machine named in GBK."""
    url = tmp_path / os.fsdecode("存储".encode("gbk"))
    assert "rename" in refused(*command, "--store", url, code=2, names=["must be UTF-8"])
    assert not url.exists()


def test_shards_that_may_not_be_read_are_not_merged(tmp_path: Path) -> None:
    both = [shutil.copytree(source, tmp_path / source.parent.name) for source in SHARDS]
    [shard] = both[1].glob("pytorch_model_*/*.distcp")
    with forbidden(shard, 0o000):
        names = [str(shard), "permission denied"]
        assert "hint: " in refused("merge", *both, tmp_path / "out", code=4, names=names)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["push", "merge"])
def test_a_full_disk(tmp_path: Path, command: str) -> None:
    """The file system goes away with the process, so the checks are made within it."""
    big = shutil.copytree(FSDP / "node0" / "checkpoint-4", tmp_path / "big" / "checkpoint-4")
    (big / "ballast_0.distcp").write_bytes(bytes(2 << 20))
    sources = [big] if command == "push" else SHARDS
    on_a_small_disk(
        tmp_path,
        f"""
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from tests.support.refused_commands import refused
        Path(sys.argv[1], "taken").write_bytes(bytes((1 << 20) - (16 << 10)))
        store = ["--store"] if {command!r} == "push" else []
        words = [{command!r}, *{[str(s) for s in sources]!r}, *store, sys.argv[1] + "/there"]
        said = refused(*words, code=4, names=[sys.argv[1], "no space left"])
        assert "hint: " in said
        left = [path for path in Path(sys.argv[1]).rglob("*") if path.suffix in (".part", \
".safetensors")]
        assert left == [], left
        """,
    )
