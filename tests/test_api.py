"""The commands as functions: what a program gets back, and what is raised."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from ckptsync import api
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from tests.support.small_store import DATA, SHARD, flip, make

ROOT = Path(__file__).parents[1]
VECTORS = ROOT / "tests/vectors"
NODES = [DATA / f"fsdp2/node{n}/checkpoint-4" for n in (0, 1)]


def test_the_example_of_the_documents_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("node0", "node1"):
        shutil.copytree(DATA / "fsdp2" / node, tmp_path / node)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/python.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(code, names)
    assert names["step"] == 4
    assert (tmp_path / "merged/model.safetensors").exists()
    assert (tmp_path / "out/checkpoint-4").is_dir()


def test_a_merge_tells_its_progress_and_says_what_it_wrote(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    model = api.merge(
        NODES, tmp_path / "m", progress=lambda done, total: told.append((done, total))
    )
    assert 0 < told[-1][0] <= told[-1][1]
    sizes = {file.path: (tmp_path / "m" / file.path).stat().st_size for file in model.files}
    assert model.bytes == sum(sizes.values())
    assert model.tensors == len(api.inspect(tmp_path / "m").sources[0].tensors)


def test_what_is_wrong_is_raised_as_the_command_ends(tmp_path: Path) -> None:
    with pytest.raises(Incomplete):
        api.merge(NODES[0], tmp_path / "m")
    with pytest.raises(ConfigError):
        api.list_checkpoints(tmp_path / "nowhere")
    store = make(tmp_path / "store")
    with pytest.raises(ConfigError):
        api.list_checkpoints(store, "nobody")
    assert api.resume_step(store, "nobody") is None
    before = api.resume_step(store, "fsdp2")
    flip(store / "fsdp2" / SHARD)
    told: list[tuple[int, int]] = []
    reports = api.verify(store, progress=lambda done, total: told.append((done, total)))
    assert [r.verdict for r in reports if r.run == "fsdp2"] == ["damaged"]
    assert told[-1][0] > 0
    assert {c.status for c in api.list_checkpoints(store, "fsdp2")} == {"DAMAGED"}
    assert api.resume_step(store, "fsdp2", trust="complete") is None, before
    with pytest.raises(Corrupt):
        api.pull("fsdp2/checkpoint-4", tmp_path / "out", store, unverified=True)


def test_what_is_pushed_is_listed_and_comes_back(tmp_path: Path) -> None:
    store, told = tmp_path / "store", list[tuple[int, int]]()

    def count(done: int, total: int) -> None:
        told.append((done, total))

    for n in (0, 1):
        source = DATA / f"fsdp2/node{n}"
        (sent,) = api.push(source, store, run="r", node=f"n{n}", progress=count)
        size = sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
        assert (told[-1], sent.size) == ((size, size), size)
    (listed,) = api.list_checkpoints(store, "r")
    assert (listed.checkpoint, listed.step, listed.nodes) == ("checkpoint-4", 4, ("n0", "n1"))
    assert (listed.status, listed.resume, listed.model) == ("COMPLETE", True, True)
    assert api.resume_step(store, "r") is None
    assert api.resume_step(store, "r", trust="complete") == 4
    pulled = api.pull("r", tmp_path / "out", store, unverified=True, node="n1")
    names = {path.name for path in pulled.directory.iterdir()}
    assert {name for name in names if name.startswith("rng_state")} == {"rng_state_1.pth"}
    with pytest.raises(Incomplete):
        api.pull("r", tmp_path / "again", store)
    for n in (1, 0):
        source = DATA / f"fsdp2/node{n}"
        (weights,) = api.push(source, tmp_path / "w", run="w", node=f"n{n}", send_files="weights")
    assert "optimizer_0/__0_0.distcp" in weights.left_out
    assert {c.status for c in api.list_checkpoints(tmp_path / "w")} == {"COMPLETE"}
    assert api.resume_step(tmp_path / "w", "w", trust="complete") is None, "weights alone"
    model = api.pull("fsdp2", tmp_path / "m", make(tmp_path / "verified"), consolidated=True)
    assert (model.directory, model.status) == (tmp_path / "m", "VERIFIED")
    assert len(api.inspect(model.directory).sources[0].tensors) == 21


def test_an_adapter_is_summed_into_its_base_and_what_it_changed_is_told(tmp_path: Path) -> None:
    base, adapter = VECTORS / "base", VECTORS / "peft-adapter/out"
    model = api.merge(adapter, tmp_path / "m", into=base)
    states = {d.name: d.state for d in api.diff(base, tmp_path / "m")}
    assert {file.path for file in model.files if file.path.endswith(".safetensors")} == {
        path.name for path in base.glob("*.safetensors")
    }
    assert set(states.values()) == {"same", "changed"}
    for wrong in ({"into": base, "base": base}, {"changed_base": True}, {"max_shard_size": 0}):
        with pytest.raises(ConfigError):
            api.merge(adapter, tmp_path / "n", **wrong)
    assert not (tmp_path / "n").exists()


def test_what_a_checkpoint_lacks_is_filled_from_another_model(tmp_path: Path) -> None:
    whole = api.merge(NODES, tmp_path / "m").destination
    filled = api.merge(NODES, tmp_path / "f", fill_from=whole, names_of=whole)
    assert {d.state for d in api.diff(whole, filled.destination)} == {"same"}
    assert {d.state for d in api.diff(NODES, whole)} == {"same"}
