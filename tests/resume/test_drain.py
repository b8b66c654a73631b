"""What of an output directory's saves is stored, and whether waiting would bring more."""

from __future__ import annotations

import math
import shutil
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from ckptsync.checkpoint_dirs import ASIDE
from ckptsync.cli.drain import Upload, upload_of
from ckptsync.errors import StoreError
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.hooks import embedded_worker
from ckptsync.records.save_decisions import Tombstone
from ckptsync.resume.drain import (
    DrainedSave,
    DrainResult,
    OutputDirSaves,
    SaveStatus,
    describe,
    drain,
    is_over,
)
from ckptsync.spool.pins import create_pin, link_files, list_pins, mark_stored
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.file_selection import EVERYTHING
from ckptsync.worker.finished import Rule
from ckptsync.worker.options import RunDir
from ckptsync.worker.store_view import StoreView
from ckptsync.worker.worker import DOUBTFUL
from tests.resume import trainer
from tests.support.filled_stores import put
from tests.support.head_in_process import verify_next
from tests.support.worker_in_process import lay, manifests, push_now

RULE = Rule(10.0, 60.0, 600.0)


def save(
    status: SaveStatus, step: int = 1, wait_left: float = 0.0, unchanged_for: float = 0.0
) -> DrainedSave:
    return DrainedSave(
        f"checkpoint-{step}", step, status, wait_left=wait_left, unchanged_for=unchanged_for
    )


@pytest.mark.parametrize(
    ("saves", "newest", "is_stored"),
    [
        ((), -1, True),
        ((save("stored", 4), save("stored", 2)), 4, True),
        ((save("stored", 4), save("unsent", 6)), 6, False),  # whole, and the store is away
        ((save("stored", 4), save("waiting", 6)), 4, False),
        ((save("refused", 6),), -1, False),  # torn
        ((DrainedSave("final", None, "stored"),), -1, True),
    ],
)
def test_the_newest_whole_save_counts_and_the_store_must_have_all(
    saves: tuple[DrainedSave, ...], newest: int, *, is_stored: bool
) -> None:
    result, unread = DrainResult(saves), DrainResult(saves, "no route")
    assert (result.newest_step, result.is_stored) == (newest, is_stored)
    assert (unread.newest_step, unread.is_stored) == (newest, False)


@pytest.mark.parametrize(
    ("saves", "max_wait", "expected"),
    [
        ((), math.inf, True),
        ((save("stored"),), math.inf, True),
        ((save("unsent"),), 5.0, False),
        ((save("waiting", wait_left=6.0),), 5.0, True),
        ((save("waiting", wait_left=5.0),), 5.0, False),
        ((save("waiting", wait_left=6.0),), math.inf, False),
        ((save("refused", unchanged_for=9.0),), math.inf, False),
        ((save("refused", unchanged_for=10.0),), math.inf, True),
        ((save("refused", unchanged_for=10.0), save("unsent")), 5.0, False),
    ],
)
def test_the_wait_is_over_when_no_further_save_would_come(
    saves: tuple[DrainedSave, ...], max_wait: float, *, expected: bool
) -> None:
    assert is_over(DrainResult(saves), RULE, max_wait) is expected
    assert not is_over(DrainResult(saves, "no route"), RULE, max_wait)


class Node:
    """An output directory with a checkpoint that is whole, and a store."""

    def __init__(self, out: Path) -> None:
        self.out, self.store = out, MemoryStore()
        trainer.save(out, 1, 9)
        view = StoreView(self.store, "n0", out.name, EVERYTHING)
        self._saves = OutputDirSaves(RunDir(out.name, out), ("n0",), view, RULE)

    def push(self) -> None:
        push_now(self.out, self.store, "n0", self.out.name)

    def read(self, now: float) -> dict[str, DrainedSave]:
        return {save.checkpoint: save for save in self._saves.read(now)}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "run")


def test_a_save_waits_until_it_has_not_changed_then_is_unsent_then_stored(node: Node) -> None:
    first, later = (node.read(now)["checkpoint-1"] for now in (100.0, 105.0))
    assert (first.status, later.status) == ("waiting", "waiting")
    assert (first.wait_left - later.wait_left, later.unchanged_for) == (5.0, 5.0)
    unsent = node.read(110.0)["checkpoint-1"]
    assert (unsent.status, unsent.unchanged_for, unsent.step) == ("unsent", 10.0, 1)
    assert unsent.reason == "not uploaded yet"
    (node.out / "checkpoint-1/trainer_state.json").touch()
    assert node.read(111.0)["checkpoint-1"].status == "waiting"
    node.push()
    stored = node.read(112.0)["checkpoint-1"]
    assert (stored.status, stored.location, stored.reason) == ("stored", "checkpoint-1", "")
    names = tuple(stored.name for stored in manifests(node.store))
    where, ended = stored.location, {"n0": time.time_ns()}
    put(node.store, Tombstone("run", where, where, 0, names, "old", ended=ended))
    node.store.delete(names[0])
    given_up = node.read(113.0)["checkpoint-1"]
    assert (given_up.status, given_up.reason) == ("stored", "given up in the store")


def test_what_a_worker_has_read_in_the_store_as_another_nodes_is_stored(node: Node) -> None:
    pin = create_pin(node.out, "checkpoint-1", 0, "n0")
    assert pin is not None
    link_files(pin, node.out / "checkpoint-1", [f.name for f in trainer.source().iterdir()])
    (pin,) = list_pins(node.out)
    assert node.read(1.0)["checkpoint-1"].status == "waiting"
    mark_stored(pin)
    assert node.read(2.0)["checkpoint-1"].status == "stored"


def test_a_save_is_whole_once_another_node_has_stored_its_part(node: Node, tmp_path: Path) -> None:
    lay(node.out, {"m/__0_0.distcp": b"shard"})
    lay(tmp_path / "n1" / "run", {"m/__1_0.distcp": b"shard"})
    push_now(tmp_path / "n1" / "run", node.store, "n1", "run")
    node.read(0.0)
    assert node.read(10.0)["checkpoint-4"].status == "unsent"


def test_a_save_that_is_damaged_in_the_store_is_refused(node: Node) -> None:
    node.push()
    node.store.write("run/checkpoint-1/scheduler.pt", [b"x"])
    verify_next(node.store, VerifyPolicy("digest", 1e-9), time.time())
    damaged = node.read(1.0)["checkpoint-1"]
    assert (damaged.status, damaged.location) == ("refused", "checkpoint-1")


def test_what_is_perhaps_not_the_final_model_is_refused(node: Node) -> None:
    for name in ("model.safetensors", "config.json"):
        shutil.copyfile(trainer.source() / name, node.out / name)
    node.read(0.0)
    final = node.read(1000.0)["final"]
    assert (final.status, final.path, final.unchanged_for) == ("refused", node.out, 1000.0)
    assert final.reason.startswith("perhaps not the final model")


def test_what_was_moved_aside_is_refused_unless_the_store_has_it(node: Node) -> None:
    aside = node.out / ASIDE
    shutil.copytree(node.out / "checkpoint-1", aside / "checkpoint-1")
    name = f"{ASIDE}/checkpoint-1"
    save = node.read(1.0)[name]
    assert (save.status, save.unchanged_for) == ("refused", math.inf)
    assert save.path == aside / "checkpoint-1"
    node.push()
    assert name not in node.read(2.0)


@pytest.mark.parametrize(
    ("has_worker", "patience"),
    [
        (False, embedded_worker.RESTART),
        (True, embedded_worker.RESTART + embedded_worker.RESTART_EVERY),
    ],
)
def test_a_directory_that_nobody_serves_is_given_up_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_worker: bool, patience: float
) -> None:
    now, saves = [1000.0], cast("OutputDirSaves", None)
    monkeypatch.setattr("ckptsync.cli.drain.time", SimpleNamespace(monotonic=lambda: now[0]))
    upload = Upload(RunDir("run", tmp_path), "n0", "/s", MemoryStore(), saves, None, has_worker)
    for later, is_lost in ((0.0, False), (patience - 1.0, False), (1.0, True)):
        now[0] += later
        assert upload.notice_lost_worker() == is_lost


def test_a_configuration_says_how_an_output_directory_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CKPTSYNC_NODE", raising=False)
    config, out = tmp_path / "c.yaml", tmp_path / "a" / "out"
    out.mkdir(parents=True)
    config.write_text(
        f"{{node: n7, store: {{url: {tmp_path}/s}}, worker: {{runs: ['{tmp_path}/*/out'],"
        " quiet: 7s, unmarked: 9s, logs: false}}"
    )
    args = Namespace(output_dir=str(out), config=str(config), url=None, run=None)
    upload = upload_of(args)
    assert (upload.run, upload.node, upload.has_logs) == (RunDir("a", out), "n7", False)
    assert upload.saves.rule == Rule(7.0, 9.0, DOUBTFUL * 9.0)
    monkeypatch.setenv("CKPTSYNC_NODE", "n8")
    args.run = "b"
    assert (upload_of(args).run.name, upload_of(args).node) == ("b", "n8")


@pytest.mark.parametrize(
    ("saves", "error", "is_stopped"),
    [
        ((save("stored"), save("refused")), "", True),
        ((save("stored"),), "no route", False),
        ((save("unsent"),), "", False),
        ((save("waiting"),), "", False),
    ],
)
def test_our_worker_is_stopped_when_it_has_nothing_left_to_send(
    saves: tuple[DrainedSave, ...],
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    is_stopped: bool,
) -> None:
    stopped = list[Path]()
    monkeypatch.setattr(embedded_worker, "stop", stopped.append)
    monkeypatch.setattr(embedded_worker, "who_uploads", lambda _: "another goes on")
    unread = cast("OutputDirSaves", None)
    upload = Upload(
        RunDir("run", tmp_path), "n0", "/s", MemoryStore(), unread, None, problem="no disk"
    )
    upload.finish(DrainResult(saves, error))
    assert stopped == [tmp_path] * is_stopped
    said = "" if is_stopped else "ckptsync: no disk\nckptsync: another goes on\n"
    assert capsys.readouterr().err == said


class Script:
    """What readings of an output directory give, one after the other; "" is an error."""

    rule = RULE

    def __init__(self, *statuses: SaveStatus | str) -> None:
        self._statuses: Iterator[str] = iter(statuses)

    def read(self, _now: float) -> tuple[DrainedSave, ...]:
        if status := next(self._statuses):
            return (save(cast("SaveStatus", status)),)
        raise StoreError("no route")


def test_an_error_ends_no_wait_and_each_change_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr("ckptsync.resume.drain.time", clock)
    script = cast("OutputDirSaves", Script("", "unsent", "unsent", "", "stored"))
    reports, workers = list[str](), list[int]()
    result = drain(script, lambda: False, lambda: workers.append(1), reports.append, math.inf)
    assert result == DrainResult((save("stored"),))
    waited_for = [text.rpartition(": ")[2] for text in reports]
    assert waited_for == ["no route", "checkpoint-1", "no route"]
    assert len(workers) == 5
    stops = iter((False, True))
    script = cast("OutputDirSaves", Script("unsent", ""))
    result = drain(script, lambda: next(stops), lambda: None, reports.append, math.inf)
    assert result == DrainResult((save("unsent"),), "no route")


@pytest.mark.parametrize(
    ("saves", "error", "advice"),
    [
        ((), "", "no such directory; if a training saved one, it was somewhere else"),
        ((save("stored"),), "", "this machine may be shut down"),
        ((save("refused"), save("stored", 2)), "", "what is not stored is on this machine only"),
        ((save("refused"), save("unsent")), "", "do not shut this machine down"),
        ((save("refused"),), "no route", "do not shut this machine down"),
        ((save("stored"),), "no route", "do not shut this machine down"),
    ],
)
def test_whether_the_machine_may_be_shut_down_is_said_last(
    saves: tuple[DrainedSave, ...], error: str, advice: str
) -> None:
    lines = describe(DrainResult(saves, error), RunDir("run", Path("/no/such/out")), "/store")
    assert advice in lines[-1]
    assert (f"the store cannot be read: {error}" in lines) == bool(error)
    statuses = [each.status for each in saves]
    starts = [line.partition(":")[0].strip() for line in lines]
    assert starts.count("not stored") == len(saves) - statuses.count("stored")
    assert starts.count("if it is whole all the same") == statuses.count("refused")
    assert starts.count("stored") == ("stored" in statuses or not error)
