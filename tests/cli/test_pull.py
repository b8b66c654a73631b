"""``ckptsync pull``: what it says, its exit codes, and what lies there afterwards.

From a directory, S3 and SFTP.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.cli import pull
from ckptsync.downloader.find import FoundCheckpoint, find
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.opening import create_store, open_store
from tests.support.command_line import Cli
from tests.support.files_in_memory import safetensors_file, write_files
from tests.support.filled_stores import put
from tests.support.small_store import DATA, SHARD, flip, make
from tests.support.worker_in_process import push_now


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("store"))


def trained(run: str) -> dict[str, bytes]:
    """What the trainers wrote, on all nodes."""
    roots = (DATA / run).glob("node*/checkpoint-4")
    return {name: data for root in roots for name, data in below(root).items()}


def below(directory: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()
    }


def told(cli: Cli, *words: object, code: int = 0) -> dict[str, Any]:
    printed: dict[str, Any] = cli("pull", *words, "--json", code=code).json
    assert printed["exit_code"] == code
    return printed


def test_a_run_comes_back_as_it_was(made: Path, tmp_path: Path, cli: Cli) -> None:
    said = told(cli, "fsdp2", tmp_path, "--store", made, "--dry-run")
    assert (said["status"], said["there"]["files"]) == ("VERIFIED", 0)
    assert said["files"] == len(trained("fsdp2"))
    assert not list(tmp_path.iterdir())
    assert "fsdp2/checkpoint-4 (VERIFIED)" in cli("pull", "fsdp2", tmp_path, "--store", made).out
    assert below(tmp_path / "checkpoint-4") == trained("fsdp2")
    (tmp_path / ".checkpoint-4.pull-0123456789abcdef").mkdir()
    again = told(cli, made / "fsdp2", tmp_path, "--dry-run")
    assert again["there"]["files"] == said["files"]
    assert (again["part"], again["notes"][-1].count("left by another pull")) == ("whole", 1)
    assert told(cli, made / "fsdp2", tmp_path / "n0", "--node", "node0")["part"] == "node0"
    cli("pull", made / "fsdp2", made / "out", code=2)  # into the store


def test_a_model_comes_into_a_directory_of_its_own(made: Path, tmp_path: Path, cli: Cli) -> None:
    cli("pull", made / "fsdp2/checkpoint-4", tmp_path / "model", "--consolidated")
    assert below(tmp_path / "model") == below(made / "fsdp2/consolidated/checkpoint-4")
    cli("pull", made / "fsdp2", f"{tmp_path}/model/x/..", "--consolidated")  # it is there
    for other in ("/", tmp_path):  # there is something else
        cli("pull", made / "fsdp2", other, "--consolidated", code=2)


def test_damage_is_not_given_and_says_what_is_missing(made: Path, tmp_path: Path, cli: Cli) -> None:
    store = tmp_path / "store"
    shutil.copytree(made, store)
    flip(store / "fsdp2" / SHARD)
    words = ("fsdp2/latest", tmp_path / "out", "--store", store)
    said = told(cli, *words, code=10)
    assert list(said["failed"]) == ["pytorch_model_fsdp_0/__0_0.distcp"]
    verify = f"`ckptsync verify fsdp2/checkpoint-4 --store {store}` records the damage; then "
    assert any(note.startswith(verify) for note in said["notes"])
    assert not (tmp_path / "out/checkpoint-4").exists()
    out = cli("pull", *words, code=10).out
    assert "failed: pytorch_model_fsdp_0/__0_0.distcp" in out
    assert f"there already: {said['files'] - 1} files" in out


def test_what_retention_deletes_meanwhile_is_an_error_that_says_so(
    made: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Path(shutil.copytree(made, tmp_path / "store"))

    def find_and_lose(*words: Any) -> FoundCheckpoint:
        found = find(*words)
        opened, name = open_store(str(store)), "checkpoint-4"
        manifests = tuple(stored.name for stored in read_state(opened).locations[0].manifests)
        put(opened, Tombstone("fsdp2", name, name, 0, manifests, "keep_last"))
        (store / "fsdp2" / SHARD).unlink()
        return found

    monkeypatch.setattr(pull, "find", find_and_lose)
    said = told(cli, "fsdp2", tmp_path / "out", "--store", store, code=3)
    assert "retention is deleting fsdp2/checkpoint-4: keep_last" in said["notes"]


REFUSED = [
    (["zero3"], 3, "none of its 1 checkpoints is VERIFIED"),
    (["zero3/checkpoint-4"], 3, "no node has uploaded it"),
    (["nobody"], 2, "run 'nobody' not found"),
    (["z"], 2, "did you mean 'zero3'?"),
    (["fsdp2/checkpoint-5"], 2, "the run has checkpoint-4"),
    (["fsdp2", "--node", "nodeX"], 2, "nodes: node0, node1"),
]


@pytest.mark.parametrize("refused", REFUSED, ids=lambda r: " ".join(r[0]))
def test_what_cannot_be_had_is_said(
    made: Path, tmp_path: Path, cli: Cli, refused: tuple[list[str], int, str]
) -> None:
    (run, *rest), code, wanted = refused
    assert wanted in cli("pull", run, tmp_path / "out", "--store", made, *rest, code=code).err
    assert not list(tmp_path.iterdir())


def test_unverified_gives_the_files_that_are_there(made: Path, tmp_path: Path, cli: Cli) -> None:
    said = told(cli, "zero3/checkpoint-4", tmp_path, "--store", made, "--unverified")
    assert below(tmp_path / "checkpoint-4").items() <= trained("zero3").items()
    assert any("rng_state_1.pth: no node has uploaded it" in note for note in said["notes"])


def test_logs_that_differ_stay_and_a_dry_run_writes_nothing(tmp_path: Path, cli: Cli) -> None:
    store, logs = create_store(str(tmp_path / "store")), tmp_path / "out/logs"
    for name in ("grown", "other"):
        store.write(f"run/logs/n0/{name}", [b"1\n2\n"])
    before = {"n0/grown": b"1\n", "n0/other": b"2\n"}
    write_files(logs, before)
    words = ("run", tmp_path / "out", "--store", store.url, "--logs")
    assert told(cli, *words, "--dry-run")["failed"] == {}
    assert below(logs) == before
    assert told(cli, *words, code=2)["failed"].keys() == {"n0/other"}
    assert below(logs) == before | {"n0/grown": b"1\n2\n"}


def test_a_best_checkpoint_that_is_not_here_is_said(tmp_path: Path, cli: Cli) -> None:
    checkpoint, best = tmp_path / "run" / "checkpoint-2", tmp_path / "run" / "checkpoint-1"
    write_files(
        checkpoint,
        {
            "model.safetensors": safetensors_file({"w": ("U8", (1,), b"x")}),
            "trainer_state.json": json.dumps({"best_model_checkpoint": str(best)}).encode(),
        },
    )
    url, where = str(tmp_path / "store"), str(tmp_path / "out")
    cli("push", checkpoint, "--store", url)
    words = ("run/checkpoint-2", where, "--store", url, "--unverified")
    assert any(f"names {best} as the best" in note for note in told(cli, *words)["notes"])
    best.mkdir()
    assert told(cli, *words)["notes"] == []


def test_hints_for_a_run_of_no_known_layout_can_be_followed(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "run/npz").mkdir(parents=True)
    (tmp_path / "run/npz/weights.npz").write_bytes(b"x")
    store = str(tmp_path / "store")
    cli("push", tmp_path / "run/npz", "--store", store, "--as", "mine")
    words = ["pull", "run", str(tmp_path / "back"), "--store", store]
    for more in ([], ["--unverified"]):
        said = cli(*words, *more, code=3).err
        assert "of no layout that ckptsync merges" in said
        assert "name one, such as run/mine" in said
    cli("pull", "run/mine", *words[2:])
    assert (tmp_path / "back/mine/weights.npz").read_bytes() == b"x"


def test_another_number_of_nodes_is_told_to_convert_shards(tmp_path: Path, cli: Cli) -> None:
    store = create_store(str(tmp_path / "store"))
    for run in ("zero3", "fsdp2"):
        for node in ("node0", "node1"):
            push_now(DATA / run / node, store, node, run)

    def notes(run: str, count: int) -> list[str]:
        words = ("--nnodes", count, "--store", store.url, "--dry-run")
        said = told(cli, f"{run}/checkpoint-4", tmp_path / "out", *words)
        return [note for note in said["notes"] if "--to universal" in note]

    assert [len(notes("zero3", n)) for n in (1, 2, 3)] == [1, 0, 1]
    assert not [note for n in (1, 2, 3) for note in notes("fsdp2", n)]
    assert "saved it: 2, nodes that will resume: 3" in notes("zero3", 3)[0]
    words = ("pull", "zero3", tmp_path / "out", "--store", store.url, "--nnodes", "0")
    assert "--nnodes: expected at least 1" in cli(*words, code=2).err
