"""Nodes agree on one checkpoint, get it, and lose nothing, whoever is killed when."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ckptsync.catalogue.uncached import read_state
from ckptsync.checkpoint_dirs import ASIDE, find_checkpoint_dirs, find_strays, list_checkpoint
from ckptsync.downloader.download_plan import PullPlan, plan_checkpoint
from ckptsync.downloader.find import PullRequest, find
from ckptsync.errors import (
    CkptsyncError,
    ConfigError,
    Corrupt,
    Incomplete,
    StoreError,
    Transient,
    Unsupported,
)
from ckptsync.resume.attempt import Attempt
from ckptsync.resume.attempt_records import AttemptRecords, End
from ckptsync.resume.choose import Candidate, NodeRecord, WholeSave
from ckptsync.resume.drain import TrainingMark
from ckptsync.resume.local_checkpoints import (
    LocalCheckpoint,
    check_idle,
    judge_output_dir,
    list_newer,
)
from ckptsync.resume.prepare import PrepareOptions, Start, prepare
from ckptsync.spool.markers import (
    PinNotes,
    TrainingProcess,
    boot_id,
    machine_id,
    process_path,
    write_mark,
)
from ckptsync.stores.contract import Entry, Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store, open_store
from ckptsync.walk import SPOOL, opened_directory
from ckptsync.worker.observation import fingerprint
from tests.resume.trainer import source
from tests.support import small_store
from tests.support.crashing_store import Crash, Dying
from tests.support.exhaustive import ALL, sampled
from tests.support.interleaving import OneOf, Turns
from tests.support.vector import ROOT
from tests.support.waiting import until

DATA = small_store.DATA / "fsdp2"
RUN, WAIT = "fsdp2", 60.0
RECORDS = f".ckptsync/resume/{RUN}"
Outcome = Start | BaseException


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with checkpoint-4 and checkpoint-5, both VERIFIED."""
    path = tmp_path_factory.mktemp("made") / "store"
    small_store.make_two(path)
    return path


@pytest.fixture
def url(made: Path, tmp_path: Path) -> str:
    shutil.copytree(made, tmp_path / "store")
    return str(tmp_path / "store")


def options(store: Store | None, **more: object) -> PrepareOptions:
    plain = PrepareOptions(store, RUN, wait=WAIT, poll=0.01, threads=1)
    return replace(plain, **more)  # type: ignore[arg-type]


def each(nodes: Iterable[str], call: Callable[[str], Start]) -> dict[str, Outcome]:
    """What a call gave, or raised, for each of the nodes, which call at once."""
    outcomes: dict[str, Outcome] = {}

    def live(node: str) -> None:
        try:
            outcomes[node] = call(node)
        except BaseException as e:  # noqa: BLE001 - the test judges it
            outcomes[node] = e

    threads = [threading.Thread(target=live, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def begin(
    tmp_path: Path, url: str, nodes: int = 2, name: str = "a", **more: object
) -> dict[str, Outcome]:
    """What an attempt of several nodes gave, each with an output directory of its own."""

    def call(node: str) -> Start:
        out, attempt = tmp_path / node, Attempt(name, nodes, node)
        return prepare(out, attempt, options(open_store(url), node=node, **more))

    return each([f"node{n}" for n in range(nodes)], call)


def alone(out: Path, url: str, name: str = "a", **more: object) -> Start:
    """What an attempt of one node gave."""
    return prepare(out, Attempt(name, 1, "n"), options(open_store(url), **more))


def failure(outcomes: Mapping[str, Outcome], kind: type[CkptsyncError]) -> str:
    """Return the error that every node raised, the same one."""
    assert {type(one) for one in outcomes.values()} == {kind}
    [text] = {str(one) for one in outcomes.values()}
    return text


def steps(outcomes: Mapping[str, Outcome]) -> list[int | None]:
    for one in outcomes.values():
        if isinstance(one, BaseException):
            raise one
    return [one.step for one in outcomes.values() if isinstance(one, Start)]


def lay(out: Path, node: str, name: str) -> Path:
    """A node's part of a checkpoint, as its training left it."""
    shutil.copytree(DATA / node / "checkpoint-4", out / name)
    state = out / name / "trainer_state.json"
    if state.exists():
        content = json.loads(state.read_text()) | {"global_step": int(name.rpartition("-")[2])}
        state.write_text(json.dumps(content))
    return out / name


def lay_whole(out: Path, name: str) -> Path:
    """A checkpoint of both nodes, of which the last file is the trainer's last."""
    for node in ("node1", "node0"):
        shutil.copytree(DATA / node / "checkpoint-4", out / name, dirs_exist_ok=True)
    state, step = out / name / "trainer_state.json", int(name.rpartition("-")[2])
    state.write_text(json.dumps(json.loads(state.read_text()) | {"global_step": step}))
    at = time.time() - 10  # later than what the store holds
    for path in (out / name).rglob("*"):
        os.utime(path, (at, at))
    os.utime(state, (at + 1, at + 1))
    return out / name


def contents(folder: Path) -> list[bytes]:
    return sorted(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def check_nothing_is_gone(before: list[bytes], folder: Path) -> None:
    now = contents(folder)
    assert not [one[:20] for one in before if one not in now]


# One node.


def take_reports(url: str, checkpoint: str = "*") -> dict[Path, bytes]:
    """Delete the reports of a store, or of one checkpoint; return them."""
    paths = Path(url).rglob(f"{checkpoint}/report-*.json")
    reports = {path: path.read_bytes() for path in [*paths]}
    for path in reports:
        path.unlink()
    return reports


@pytest.mark.parametrize("unverified", ["*", "checkpoint-5"])
def test_a_training_waits_for_the_verifier(url: str, tmp_path: Path, unverified: str) -> None:
    reports = take_reports(url, unverified)
    assert reports
    sentences: list[str] = []

    def say(text: str) -> None:
        sentences.append(text)
        for path, content in reports.items():
            path.write_bytes(content)

    start = alone(tmp_path / "out", url, say=say)
    assert start.step == 5
    assert sentences[0] == "waits until checkpoint-5, which is complete, is verified"


def test_no_training_begins_anew_beside_unverified_saves(url: str, tmp_path: Path) -> None:
    take_reports(url)
    out = tmp_path / "out"
    with pytest.raises(Incomplete, match="no checkpoint is verified, and checkpoint-5") as error:
        alone(out, url, wait=0.2)
    assert "--trust complete" in error.value.hint
    assert alone(out, url, trust="complete").step == 5


def test_an_older_checkpoint_is_taken_where_no_verifier_comes(url: str, tmp_path: Path) -> None:
    take_reports(url, "checkpoint-5")
    start = alone(tmp_path / "out", url, wait=0.2)
    assert start.step == 4
    assert "checkpoint-5 is newer and complete, but no verifier has read it" in start.text


def test_one_node_gets_the_newest_and_moves_newer_ones_aside(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lay(out, "node0", "checkpoint-900")
    (out / "checkpoint-5").mkdir()
    (out / "checkpoint-5" / "scheduler.pt").write_bytes(b"another training's")
    before = contents(out)
    start = alone(out, url)
    assert (start.checkpoint, start.step) == (out / "checkpoint-5", 5)
    assert "checkpoint-900 was moved to" in start.text
    check_nothing_is_gone(before, out)
    assert {one.name for one in find_checkpoint_dirs(out)} == {"checkpoint-5"}
    assert find_strays(out) == {}
    assert sorted(one.name for one in out.iterdir()) == [ASIDE, "checkpoint-5"]
    # what is here with the right bytes is neither downloaded nor moved again
    inode = (out / "checkpoint-5" / "scheduler.pt").stat().st_ino
    assert alone(out, url, "b").step == 5
    assert (out / "checkpoint-5" / "scheduler.pt").stat().st_ino == inode
    assert not list(Path(url, ".ckptsync").glob("resume/*"))


def test_names_that_are_aside_already_stay(url: str, tmp_path: Path) -> None:
    for number in range(3):
        lay(tmp_path / "out", "node0", "checkpoint-900")
        alone(tmp_path / "out", url, f"a{number}")
    aside = sorted(one.name for one in (tmp_path / "out" / ASIDE).iterdir())
    assert aside == ["checkpoint-900", "checkpoint-900.2", "checkpoint-900.3"]


def test_only_greater_steps_of_the_same_series_and_torn_ones_are_in_the_way() -> None:
    names = ("checkpoint-4", "checkpoint-5", "checkpoint-6", "global_step900")
    local = [LocalCheckpoint(WholeSave(name, name, 1.0), Path(name)) for name in names]
    torn = [replace(each, torn="half") for each in local]
    for choice, checkpoints, expected in (
        (Candidate("checkpoint-5", "x"), local, names[2:3]),
        (Candidate("checkpoint-5", "x"), torn, (names[0], *names[2:])),
        (None, local, names),
    ):
        assert tuple(c.save.checkpoint for c in list_newer(checkpoints, choice)) == expected


def test_a_checkpoint_arrives_where_others_of_its_training_lie(url: str, tmp_path: Path) -> None:
    lay(tmp_path / "out" / "checkpoints", "node0", "checkpoint-900")
    start = alone(tmp_path / "out", url)
    assert start.checkpoint == tmp_path / "out" / "checkpoints" / "checkpoint-5"
    assert (tmp_path / "out" / ASIDE / "checkpoints.checkpoint-900").is_dir()


def test_newer_checkpoints_stay_with_keep_newer(url: str, tmp_path: Path) -> None:
    lay(tmp_path / "out", "node0", "checkpoint-900")
    start = alone(tmp_path / "out", url, keep_newer=True)
    assert start.step == 5
    assert "checkpoint-900 stay" in start.text
    assert (tmp_path / "out" / "checkpoint-900").is_dir()


def test_a_scripts_checkpoints_are_not_torn_beside_similar_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for step in (1, 2):
        folder = out / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        shutil.copy(source() / "model.safetensors", folder)
        pin = out / SPOOL / "pins" / f"{folder.name}.0"
        shutil.copytree(folder, pin / "files")
        here = list_checkpoint(find_checkpoint_dirs(out)[-1])
        notes = PinNotes(stable=fingerprint(here.files))
        (pin / "owner.json").write_text(json.dumps({"node": "n"}))
        (pin / "notes.json").write_text(json.dumps(asdict(notes)))
    assert [one.torn for one in judge_output_dir(out, "n")] == ["", ""]
    shutil.rmtree(out / "checkpoint-2")
    assert len(judge_output_dir(out, "n")) == 1  # a pin alone cannot be resumed from


@pytest.mark.parametrize(("killed", "step"), [(True, 10), (False, 20)])
def test_what_lacks_a_rank_is_not_chosen(tmp_path: Path, *, killed: bool, step: int) -> None:
    """Nor does a training that had ended before the save count, whatever its ranks."""
    for name in ("checkpoint-10", "checkpoint-20"):
        shutil.copytree(ROOT / "hf-ddp" / "out" / "checkpoint-4", tmp_path / name)
        state = json.loads((tmp_path / name / "trainer_state.json").read_text())
        state["global_step"] = int(name.rpartition("-")[2])
        (tmp_path / name / "trainer_state.json").write_text(json.dumps(state))
        for path in (tmp_path / name).iterdir():
            os.utime(path, (state["global_step"], state["global_step"]))
    (tmp_path / "checkpoint-20" / "rng_state_1.pth").unlink()
    ended = 0.0 if killed else 15.0
    mark = TrainingProcess(
        "t", 0, 2, 2, socket.gethostname(), 2**22 + 1, "1", boot_id(), 5.0, machine=machine_id()
    )
    write_mark(process_path(tmp_path / SPOOL, "hook"), replace(mark, ended=ended, left=ended))
    assert prepare(tmp_path, Attempt("a", 1, "n"), options(None)).step == step


def test_without_a_store_the_newest_whole_directory_is_chosen(tmp_path: Path) -> None:
    for name in ("checkpoint-10", "checkpoint-20"):
        lay_whole(tmp_path, name)
    torn = lay_whole(tmp_path, "checkpoint-30")
    (torn / "trainer_state.json").unlink()
    half = lay_whole(tmp_path, "checkpoint-40")
    (half / "pytorch_model_fsdp_0" / "__1_0.distcp").unlink()
    before = contents(tmp_path)
    start = prepare(tmp_path, Attempt("a", 1, "n"), options(None))
    assert (start.checkpoint, start.step) == (tmp_path / "checkpoint-20", 20)
    assert sorted(one.name for one in (tmp_path / ASIDE).iterdir()) == [
        "checkpoint-30",
        "checkpoint-40",
    ]
    check_nothing_is_gone(before, tmp_path)


def test_without_a_checkpoint_the_training_begins_from_the_beginning(tmp_path: Path) -> None:
    out = tmp_path / "out"
    start = prepare(out, Attempt("a", 1, "n"), options(None))
    assert (start.checkpoint, start.step) == (None, None)
    assert not out.exists()
    with pytest.raises(Incomplete, match="no checkpoint to begin with"):
        prepare(out, Attempt("a", 1, "n"), options(None, require=True))
    store = create_store(str(tmp_path / "empty"))
    outcomes = begin(tmp_path, store.url, require=True)
    assert "no checkpoint to begin with" in failure(outcomes, Incomplete)


def test_several_nodes_need_a_store_and_none_may_hold_the_output(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="store"):
        alone(Path(url, "out"), url)
    with pytest.raises(ConfigError, match="2 nodes agree on a checkpoint through a store"):
        prepare(tmp_path, Attempt("a", 2, "n"), options(None))


def test_a_best_checkpoint_that_is_not_here_is_pulled_or_named(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name, checkpoint, said in (
        ("checkpoint-4", 10, "checkpoint-4, the best checkpoint, was pulled, too"),
        ("checkpoint-7", 11, "is not here, and cannot be pulled: "),
        ("../checkpoint-5", 12, "is not here: load_best_model_at_end loads nothing"),
    ):
        at = lay_whole(out, f"checkpoint-{checkpoint}")
        state = at / "trainer_state.json"
        content = json.loads(state.read_text()) | {"best_model_checkpoint": str(out / name)}
        state.write_text(json.dumps(content))
        start = alone(out, url)
        assert start.step == checkpoint
        assert said in start.text
        assert (out / "checkpoint-4" / "trainer_state.json").is_file()


# Several nodes.


@pytest.mark.parametrize("nodes", [2, 3])
def test_nodes_begin_with_one_step_and_each_has_it(url: str, tmp_path: Path, nodes: int) -> None:
    outcomes = begin(tmp_path, url, nodes)
    assert steps(outcomes) == [5] * nodes
    for node in range(nodes):
        names = {p.name for p in (tmp_path / f"node{node}" / "checkpoint-5").rglob("*")}
        assert {"__0_0.distcp", "__1_0.distcp", "trainer_state.json"} <= names
        # with a third node, ranks may move to other nodes: each gets the files of all
        ranks = {f"rng_state_{rank}.pth" for rank in ((node,) if nodes == 2 else (0, 1))}
        assert {name for name in names if name.startswith("rng_state")} == ranks


def test_a_node_links_what_it_has_of_the_checkpoint(url: str, tmp_path: Path) -> None:
    part = lay(tmp_path / "node1", "node1", "checkpoint-5")
    shard = Path("pytorch_model_fsdp_0", "__1_0.distcp")
    inode = (part / shard).stat().st_ino
    before = contents(tmp_path / "node1")
    assert steps(begin(tmp_path, url)) == [5, 5]
    assert (tmp_path / "node1" / "checkpoint-5" / shard).stat().st_ino == inode
    check_nothing_is_gone(before, tmp_path / "node1")


def test_a_download_changes_no_times_of_what_lies_there(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    part = lay(out, "node0", "checkpoint-5")
    pin = shutil.copytree(part, tmp_path / "pin", copy_function=os.link)
    files = [path for path in pin.rglob("*") if path.is_file()]
    for path in files:
        os.utime(path, (1, 1))
    assert alone(out, url).step == 5
    assert {path.stat().st_mtime for path in files} == {1}


def test_an_attempt_has_one_answer_and_a_new_one_its_own(url: str, tmp_path: Path) -> None:
    newer = (Path(url, RUN, "checkpoint-5"), Path(url, RUN, ".ckptsync", "checkpoint-5"))
    for n, path in enumerate(newer):
        path.rename(tmp_path / f"newer-{n}")
    assert steps(begin(tmp_path, url)) == [4, 4]
    for n, path in enumerate(newer):
        (tmp_path / f"newer-{n}").rename(path)
    # one node is started again, on a new disk, while the other trains and has saved since
    shutil.rmtree(tmp_path / "node0")
    saved = lay(tmp_path / "node1", "node1", "checkpoint-6")
    said: list[str] = []
    for node in ("node0", "node1"):
        asked = options(open_store(url), say=said.append)
        assert prepare(tmp_path / node, Attempt("a", 2, node), asked).step == 4
    assert any("attempt a was begun before checkpoint-5 was saved" in one for one in said)
    assert saved.is_dir()
    assert steps(begin(tmp_path, url, name="b")) == [5, 5]
    shutil.rmtree(tmp_path / "node0")
    for path, why in (
        (newer[0] / "scheduler.pt", "not all of its files are in the store"),
        (next(newer[1].glob("manifest-node1-*")), "it was changed since it was chosen"),
    ):
        path.unlink()
        with pytest.raises((Corrupt, Incomplete), match=why):
            prepare(tmp_path / "node0", Attempt("b", 2, "node0"), options(open_store(url)))


def test_a_late_node_is_waited_for_and_an_absent_one_fails_all(url: str, tmp_path: Path) -> None:
    first = threading.Event()

    def call(node: str) -> Start:
        if node == "node1":
            assert first.wait(60)
        return prepare(
            tmp_path / node,
            Attempt("a", 2, node),
            options(open_store(url), say=lambda _: first.set()),
        )

    assert steps(each(("node0", "node1"), call)) == [5, 5]
    before = contents(tmp_path / "node0")
    for node in ("node0", "node1"):  # the second one comes too late
        with pytest.raises(Incomplete, match="only 1 of 2 nodes have come: node0"):
            prepare(tmp_path / node, Attempt("b", 2, node), options(open_store(url), wait=0.2))
    assert contents(tmp_path / "node0") == before


def test_a_node_that_dies_before_it_is_ready_fails_all_alike(url: str, tmp_path: Path) -> None:
    before = lay(tmp_path / "node0", "node0", "checkpoint-900")
    dead = Attempt("a", 2, "node1")
    AttemptRecords(open_store(url), RUN, dead).join(NodeRecord("node1", 2, ()))
    for node in ("node0", "node1"):  # the second one is begun again, too late
        with pytest.raises(Incomplete, match="node0: attempt a: without a sign for 0 s: node1"):
            prepare(tmp_path / node, Attempt("a", 2, node), options(open_store(url), wait=0.2))
    assert before.is_dir()


def test_a_node_that_shows_its_progress_is_waited_for(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = AttemptRecords(open_store(url), RUN, Attempt("a", 2, "node1"))
    now, signs = itertools.count(0.0, WAIT / 3), itertools.count()

    def sleep(_seconds: float) -> None:
        next(now)
        other.show_progress(number := next(signs))
        if number == 5:
            other.join(replace(other.read().nodes["node0"], node="node1"))
        elif number == 10:
            other.set_ready(())

    clock = SimpleNamespace(monotonic=lambda: next(now), sleep=sleep)
    monkeypatch.setattr("ckptsync.resume.prepare.time", clock)
    assert prepare(tmp_path, Attempt("a", 2, "node0"), options(open_store(url))).step == 5
    assert Path(url, RECORDS, "a/node0.getting").exists(), "and it shows its own"


def test_in_a_store_where_two_can_write_the_end_the_last_one_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Shared(MemoryStore):
        is_exclusive = False

    store, pauses = Shared(), list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        store.write(f"{RECORDS}/a/~end.json", [msgspec.json.encode(End("node1", "failed"))])

    monkeypatch.setattr("ckptsync.resume.attempt_records.time", SimpleNamespace(sleep=sleep))
    records = AttemptRecords(store, RUN, Attempt("a", 2, "node0"))
    assert records.close(End("node0", checkpoint="checkpoint-5")).node == "node1"
    assert pauses == [2.0]
    store.write(f"{RECORDS}/a/~end.json", [msgspec.json.encode(End("node2", "failed"))])
    assert records.read().end == End("node2", "failed")


def is_awaited(folder: Path) -> bool:
    """Whether somebody waits for a lock on a directory."""
    waiting = [line for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    return any(f":{folder.stat().st_ino} " in line for line in waiting)


def test_checkpoints_are_moved_under_a_lock_and_their_moves_are_durable(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    lay(out, "node0", "checkpoint-900")
    lay(out, "node0", "checkpoint-5")
    synced: list[Path] = []

    def fsync(fd: int, real: Callable[[int], None] = os.fsync) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    def plan(*words: object, real: Callable[..., PullPlan] = plan_checkpoint) -> PullPlan:
        return replace(real(*words), pointers={"latest": b"checkpoint-5"})

    monkeypatch.setattr("ckptsync.resume.prepare.plan_checkpoint", plan)
    monkeypatch.setattr(os, "fsync", fsync)
    with opened_directory(out) as fd, ThreadPoolExecutor(1) as pool:
        fcntl.flock(fd, fcntl.LOCK_EX)
        start = pool.submit(alone, out, url)
        assert until(lambda: is_awaited(out))
        names = {path.name for path in out.iterdir()}
        assert names == {"checkpoint-5", "checkpoint-900", ".ckptsync-resume"}
        synced.clear()
        fcntl.flock(fd, fcntl.LOCK_UN)
        assert start.result().step == 5
    assert {path.name for path in out.iterdir()} == {"checkpoint-5", "latest", ASIDE}
    assert synced[:2] in ([out, out / ASIDE], [out / ASIDE, out])
    assert synced[2] == out


class Away(MemoryStore):
    """A store that fails for a moment in some of its listings of an attempt."""

    def __init__(self, failing: Iterable[int]) -> None:
        super().__init__()
        self._calls, self._failing = itertools.count(), failing

    def names(self, prefix: str) -> Iterator[Entry]:
        if prefix.startswith(RECORDS) and next(self._calls) in self._failing:
            raise Transient("memory: 503")
        return super().names(prefix)


def test_a_store_that_is_away_for_a_moment_ends_no_attempt(tmp_path: Path) -> None:
    for failing, kind in ((range(1, 4), None), (range(1, 10**6), StoreError)):
        store = Away(failing)
        other = AttemptRecords(store, RUN, Attempt("a", 2, "node1"))
        other.join(NodeRecord("node1", 2, ()))
        other.set_ready(())
        with pytest.raises(kind) if kind else contextlib.nullcontext():
            prepare(tmp_path, Attempt("a", 2, "node0"), options(store, wait=0.2 if kind else WAIT))


def test_a_node_that_begins_with_another_checkpoint_is_named(tmp_path: Path) -> None:
    store = MemoryStore()
    other = AttemptRecords(store, RUN, Attempt("a", 2, "node1"))
    other.join(NodeRecord("node1", 2, ()))
    other.close(End("node1", checkpoint="checkpoint-9"))
    with pytest.raises(ConfigError, match="node1 begins with checkpoint-9, and this node was to"):
        prepare(tmp_path, Attempt("a", 2, "node0"), options(store))


def test_a_node_whose_id_looks_like_a_record_cannot_take_part() -> None:
    with pytest.raises(ConfigError, match="an id that ends in"):
        AttemptRecords(MemoryStore(), RUN, Attempt("a", 2, "node0.ready"))


def test_more_nodes_than_expected_are_named(url: str, tmp_path: Path) -> None:
    assert steps(begin(tmp_path, url)) == [5, 5]
    with pytest.raises(ConfigError, match="3 nodes take part in an attempt of 2: new, node0"):
        prepare(tmp_path / "new", Attempt("a", 2, "new"), options(open_store(url)))
    assert steps(begin(tmp_path, url)) == [5, 5]


def test_a_node_that_cannot_get_it_fails_all_alike(url: str, tmp_path: Path) -> None:
    (tmp_path / "node1").write_text("in the way")
    lay(tmp_path / "node0", "node0", "checkpoint-900")
    outcomes = begin(tmp_path, url)
    assert failure(outcomes, ConfigError).startswith("node1: ")
    assert (tmp_path / "node0" / "checkpoint-900").is_dir()  # nobody was ready


def test_a_node_whose_training_still_writes_fails_all_alike(url: str, tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    TrainingMark(tmp_path / "node1", "before", os.getpid(), time.time()).begin()
    outcomes = begin(tmp_path, url)
    assert "node1: a training writes here" in failure(outcomes, ConfigError)


def test_a_mark_of_another_machine_does_not_say_that_a_training_writes(tmp_path: Path) -> None:
    TrainingMark(tmp_path, "before", os.getpid(), time.time()).begin()
    with pytest.raises(ConfigError, match="a training writes here"):
        check_idle(tmp_path)
    (mark,) = (path for path in tmp_path.rglob("trains/*") if path.is_file())
    other = {"host": "another", "machine": "another", "boot": "another"}
    mark.write_text(json.dumps(json.loads(mark.read_text()) | other))
    check_idle(tmp_path)


def test_damage_in_the_store_fails_all_alike(url: str, tmp_path: Path) -> None:
    small_store.flip(Path(url, RUN, "checkpoint-5", "scheduler.pt"))
    outcomes = begin(tmp_path, url)
    assert {type(one) for one in outcomes.values()} == {Corrupt}
    assert "scheduler.pt" in str(outcomes["node0"])


def test_nodes_that_share_their_output_directory_share_a_download(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    lay_whole(out, "checkpoint-900")
    (out / "checkpoint-900" / "trainer_state.json").unlink()
    (out / "checkpoint-5").mkdir()
    (out / "checkpoint-5" / "x").write_bytes(b"another training's")
    before = contents(out)

    def call(node: str) -> Start:
        return prepare(out, Attempt("a", 3, node), options(open_store(url)))

    outcomes = each(("n0", "n1", "n2"), call)
    assert steps(outcomes) == [5, 5, 5]
    check_nothing_is_gone(before, out)
    assert sorted(one.name for one in (out / ASIDE).iterdir()) == ["checkpoint-5", "checkpoint-900"]
    # a whole save that all see needs no store
    lay_whole(out, "checkpoint-8")

    def call_again(node: str) -> Start:
        return prepare(out, Attempt("b", 2, node), options(open_store(url)))

    assert steps(each(("n0", "n1"), call_again)) == [8, 8]


def test_another_download_that_stands_still_is_not_waited_for(url: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = find(open_store(url), PullRequest(f"{RUN}/checkpoint-5")).plan
    hidden = out / f".{plan.name}.pull-{plan.key}"
    hidden.mkdir(parents=True)
    with opened_directory(hidden) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX)
        with pytest.raises(Incomplete, match="it has got nothing for") as error:
            alone(out, url, wait=0.2)
        assert "stop the other download" in error.value.hint


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"\0garbage", Corrupt),
        (b'{"format":1,"node":"no', Corrupt),
        (b'{"format":1,"node":"node2","nnodes":2,"candidates":[]}', Corrupt),
        (b'{"format":9}', Unsupported),
    ],
)
def test_a_record_that_cannot_be_read_fails_the_attempt(
    url: str, tmp_path: Path, data: bytes, kind: type[CkptsyncError]
) -> None:
    open_store(url).write(f"{RECORDS}/a/node1.json", [data])
    outcomes = begin(tmp_path, url)
    assert {type(one) for one in outcomes.values()} == {kind}
    assert "node1.json" in str(outcomes["node0"])


# Kills and failures.


def test_a_node_may_be_killed_at_every_moment_and_begun_again(made: Path, tmp_path: Path) -> None:
    for lives in itertools.count(0, 1 if ALL else 3):
        shutil.copytree(made, tmp_path / "store")
        url, dead = str(tmp_path / "store"), list[int]()
        lay(tmp_path / "node0", "node0", "checkpoint-900")
        lay(tmp_path / "node0", "node0", "checkpoint-5")
        before = contents(tmp_path / "node0")

        def call(node: str, lives: int = lives, url: str = url, dead: list[int] = dead) -> Start:
            out, attempt = tmp_path / node, Attempt("a", 2, node)
            if node == "node0":
                try:
                    return prepare(out, attempt, options(Dying(open_store(url), lives), node=node))
                except Crash:
                    dead.append(lives)
            return prepare(out, attempt, options(open_store(url), node=node))

        assert steps(each(("node0", "node1"), call)) == [5, 5]
        check_nothing_is_gone(before, tmp_path / "node0")
        aside = sorted(one.name for one in (tmp_path / "node0" / ASIDE).iterdir())
        assert aside == ["checkpoint-5", "checkpoint-900"]
        for name in ("store", "node0", "node1"):
            shutil.rmtree(tmp_path / name)
        if not dead:
            break
    assert lives > 5


def test_a_node_that_was_killed_between_its_renames_goes_on(url: str, tmp_path: Path) -> None:
    """The other save has been moved aside, and the checkpoint is not in its place yet."""
    lay(tmp_path / "node0", "node0", "checkpoint-5")
    lay(tmp_path / "node0", "node0", "checkpoint-900")
    before = contents(tmp_path / "node0")
    assert steps(begin(tmp_path, url)) == [5, 5]
    out = tmp_path / "node0"
    inside = contents(out / "checkpoint-5")
    (out / "checkpoint-5").rename(out / "half")
    record = json.loads(Path(url, RECORDS, "a", "node0.json").read_text())
    chosen = next(one for one in record["candidates"] if one["checkpoint"] == "checkpoint-5")
    staging = out / ".ckptsync-resume" / chosen["id"]
    staging.mkdir(parents=True)
    (out / "half").rename(staging / "checkpoint-5")
    (out / ASIDE / "checkpoint-900").rename(out / "checkpoint-900")
    asked = options(open_store(url), node="node0")
    assert prepare(out, Attempt("a", 2, "node0"), asked).step == 5
    assert contents(out / "checkpoint-5") == inside
    assert sorted(one.name for one in out.iterdir()) == [ASIDE, "checkpoint-5"]
    assert (out / ASIDE / "checkpoint-900").is_dir()
    check_nothing_is_gone(before, out)
    later = lay(out, "node0", "checkpoint-900")  # the training has come so far since
    assert prepare(out, Attempt("a", 2, "node0"), asked).step == 5
    assert later.is_dir()


@pytest.mark.parametrize("seed", sampled(range(8), 3))
def test_no_attempt_begins_with_two_steps(url: str, tmp_path: Path, seed: int) -> None:
    """Meanwhile a head verifies the newer checkpoint, and one node dies and begins again."""
    dice = random.Random(seed)
    turns, store = Turns(dice), open_store(url)
    reports = list(Path(url, RUN, ".ckptsync", "checkpoint-5").glob("report-*"))
    for report in reports:
        report.rename(tmp_path / report.name)

    def verify() -> object:
        for _ in range(dice.randrange(60)):
            turns.take("head")
        for report in reports:
            (tmp_path / report.name).rename(report)
        return None

    def call(node: str, lives: int) -> Start:
        out, attempt = tmp_path / node, Attempt("a", 3, node)
        own = OneOf(store, node, turns)
        try:
            return prepare(out, attempt, options(Dying(own, lives), poll=0.001))
        except Crash:
            return prepare(out, attempt, options(own, poll=0.001))

    nodes = {node: dice.randrange(12) for node in ("node0", "node1", "node2")}
    work: dict[str, Callable[[], object]] = {
        node: lambda node=node, lives=lives: call(node, lives)  # type: ignore[misc]
        for node, lives in nodes.items()
    }
    outcomes = turns.run(work | {"head": verify})
    del outcomes["head"]
    assert len(set(steps(outcomes))) == 1  # type: ignore[arg-type]
    assert set(steps(outcomes)) <= {4, 5}  # type: ignore[arg-type]


def test_records_of_old_attempts_are_removed(url: str, tmp_path: Path) -> None:
    store = open_store(url)
    for number in range(25):
        name = f"{RECORDS}/old{number}/node0.json"
        store.write(name, [b"{}"])
        os.utime(Path(url, name), (2e9 + number, 2e9 + number))
    store.write(f"{RECORDS}/old5/node1.json", [b"{}"])  # of a node that came first
    assert steps(begin(tmp_path, url)) == [5, 5]
    names = set(store.dirs(f"{RECORDS}/"))
    assert names == {"a", *(f"old{number}" for number in range(5, 25))}
    assert all(one.run in {RUN, "zero3"} for one in read_state(store).locations)
