"""``ckptsync pull``: what it says, its exit codes, and what lies there afterwards.

From a directory, S3 and SFTP.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.cli import pull
from ckptsync.cli.main import main
from ckptsync.downloader.find import FoundCheckpoint
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.records.save_decisions import Tombstone
from ckptsync.stores.contract import Store, read_all
from ckptsync.stores.opening import create_store, open_store
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.push import find_offer, push
from ckptsync.worker.worker import Worker
from tests.support.command_line import Cli
from tests.support.files_in_memory import safetensors_file, write_files
from tests.support.filled_stores import put
from tests.support.head_in_process import consolidate_due, verify_next
from tests.support.small_store import DATA, SHARD, flip, make
from tests.support.worker_in_process import push_now, tick


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
    assert "left by another pull" in again["notes"][-1]
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
    assert not (tmp_path / "out/checkpoint-4").exists()
    out = cli("pull", *words, code=10).out
    assert "failed: pytorch_model_fsdp_0/__0_0.distcp" in out
    assert f"there already: {said['files'] - 1} files" in out


def test_what_retention_deletes_meanwhile_is_an_error_that_says_so(
    made: Path, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Path(shutil.copytree(made, tmp_path / "store"))

    def find(*words: Any) -> FoundCheckpoint:
        found = found_before(*words)
        opened, name = open_store(str(store)), "checkpoint-4"
        manifests = tuple(stored.name for stored in read_state(opened).locations[0].manifests)
        put(opened, Tombstone("fsdp2", name, name, 0, manifests, "keep_last"))
        (store / "fsdp2" / SHARD).unlink()
        return found

    found_before = pull.find
    monkeypatch.setattr(pull, "find", find)
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


@pytest.fixture(scope="module")
def agreed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``fsdp2`` of two nodes whose hooks agreed on a save id, VERIFIED."""
    path = tmp_path_factory.mktemp("agreed") / "store"
    store = create_store(str(path))
    for node in ("node0", "node1"):
        offer = find_offer(DATA / "fsdp2" / node)
        push(replace(offer, run="fsdp2", save="0123456789abcdef"), store, node)
    consolidate_due(store, HeadOptions())
    verify_next(store, VerifyPolicy(), time.time())
    return path


@pytest.fixture
def store(agreed: Path, tmp_path: Path) -> Store:
    shutil.copytree(agreed, tmp_path / "store")
    return open_store(str(tmp_path / "store"))


def workers(
    tmp_path: Path, store: Store, nodes: tuple[str, str] = ("node0", "node1")
) -> list[Worker]:
    return [
        Worker(WorkerOptions(node, RunDir("fsdp2", tmp_path / out), quiet=0.0, unmarked=0.0), store)
        for node, out in zip(nodes, "AB", strict=True)
    ]


def phases(watching: list[Worker], *at: float) -> list[str]:
    found: list[str] = []
    for now in at:
        for result in [tick(worker, now) for worker in watching]:
            assert result.failures == ()
            found += [p.phase for p in result.progress]
    return found


def state(store: Store) -> dict[str, tuple[str, int]]:
    return {s.location: (s.status, len(s.manifests)) for s in read_state(store).locations}


def bring(tmp_path: Path) -> None:
    """Pull both nodes' shards onto A, and what node1 needs onto B."""
    for words in (["A"], ["B", "--node", "node1"]):
        words[0] = str(tmp_path / words[0])
        assert main(["pull", f"{tmp_path}/store/fsdp2/checkpoint-4", *words]) == 0


SAME, OTHER = ("node0", "node1"), ("other0", "other1")


def test_a_copy_serves_to_repair_the_store(store: Store, tmp_path: Path, cli: Cli) -> None:
    bring(tmp_path)
    watching = workers(tmp_path, store, OTHER)
    phases(watching, 0.0, 1.0)
    flip(tmp_path / "store" / "fsdp2" / SHARD)
    cli("verify", "--store", tmp_path / "store", code=10)
    assert [r.name for r in tick(watching[0], 2.0).repairs if not r.reason] == [SHARD]
    cli("verify", "--store", tmp_path / "store")
    assert state(store) == {"checkpoint-4": ("VERIFIED", 2)}


def test_a_copy_of_what_retention_gave_up_is_not_sent_again(store: Store, tmp_path: Path) -> None:
    bring(tmp_path)
    (seen,) = read_state(store).locations
    manifests, name = tuple(stored.name for stored in seen.manifests), "checkpoint-4"
    put(store, Tombstone("fsdp2", name, name, 0, manifests, "keep_last"))
    watching = workers(tmp_path, store, OTHER)
    assert set(phases(watching, 0.0, 5.0, 2000.0)) == {"retired"}
    assert state(store) == {"checkpoint-4": ("RETIRED", 2)}


def test_what_is_added_to_a_pulled_checkpoint_is_sent(store: Store, tmp_path: Path) -> None:
    bring(tmp_path)
    for out in "AB":
        (tmp_path / out / "checkpoint-4" / "README.md").write_text("evaluated")
    watching = workers(tmp_path, store)
    assert "sent" in phases(watching, 0.0, 5.0, 2000.0)
    assert "sent" not in phases(watching, 2001.0, 4000.0)
    (word,) = {word for word, _ in state(store).values()}
    assert word == "CONSOLIDATED"
    verify_next(store, VerifyPolicy(), time.time())
    assert {word for word, _ in state(store).values()} == {"VERIFIED"}


@pytest.mark.parametrize("nodes", [SAME, OTHER])
def test_what_a_resumed_training_writes_over_a_pulled_checkpoint_is_another_save(
    nodes: tuple[str, str], store: Store, tmp_path: Path
) -> None:
    bring(tmp_path)
    for out, rank in (("A", 0), ("B", 1)):
        for path in sorted((tmp_path / out / "checkpoint-4").rglob(f"__{rank}_0.distcp")):
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
    watching = workers(tmp_path, store, nodes)
    assert "sent" in phases(watching, 0.0, 5.0, 2000.0)
    assert set(phases(watching, 2001.0, 4000.0)) == {"stored"}
    assert state(store).pop("checkpoint-4") == ("VERIFIED", 2)
    (again,) = [s for s in read_state(store).locations if s.location != "checkpoint-4"]
    assert again.status == "COMPLETE"
    for out, rank in (("A", 0), ("B", 1)):
        for path in (tmp_path / out / "checkpoint-4").rglob(f"__{rank}_0.distcp"):
            (at,) = again.files[str(path.relative_to(tmp_path / out / "checkpoint-4"))]
            assert read_all(store, at.name) == path.read_bytes()


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
    cli("pull", "zero3", tmp_path / "out", "--nnodes", "0", code=2)
