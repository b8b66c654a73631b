"""The demo's trainer."""

from pathlib import Path

import pytest

from ckptsync.cli.demo_nodes import BASE, DATA, flip, play, script
from ckptsync.errors import StoreError


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_every_file_is_written_once_on_its_own_node(kind: str, tmp_path: Path) -> None:
    list(play(script(kind, DATA / kind, lambda node: tmp_path / node), pause=0))
    wanted = {p.relative_to(DATA / kind): p.read_bytes() for p in (DATA / kind).rglob("*") if p.is_file()}
    assert {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == wanted
    assert {p.parts[0] for p in wanted} == {"node0", "node1"}


@pytest.mark.parametrize("kind", ["fsdp2", "zero3"])
def test_the_order_is_the_trainers(kind: str, tmp_path: Path) -> None:
    names = [w.target.name for w in script(kind, DATA / kind, lambda node: tmp_path / node)]
    assert names[-1] == "trainer_state.json"
    shards = [i for i, name in enumerate(names) if name.endswith((".distcp", "_states.pt"))]
    assert len(shards) == 4
    assert max(shards) < min(i for i, name in enumerate(names) if name in (".metadata", "latest"))


def test_the_base_has_what_a_model_without_config_needs() -> None:
    assert {"config.json", "tokenizer.json"} <= {p.name for p in BASE.iterdir()}


def test_an_installation_without_data_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no demo data"):
        script("x", tmp_path, lambda node: tmp_path / node)


def test_a_flip_turns_one_bit_and_twice_none(tmp_path: Path) -> None:
    path = tmp_path / "shard"
    path.write_bytes(bytes(range(100)))
    path.chmod(0o400)
    flip(path, 50)
    assert [i for i, byte in enumerate(path.read_bytes()) if byte != i] == [50]
    flip(path, 50)
    assert path.read_bytes() == bytes(range(100))
