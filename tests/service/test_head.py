"""The roles of the head: real child processes over a real store."""

import math
import os
import shlex
import time
from functools import partial
from pathlib import Path

import pytest

import ckptsync
from ckptsync.catalogue.cached import Cache, read_catalogue
from ckptsync.catalogue.uncached import read_state
from ckptsync.cli.main import main
from ckptsync.config.loading import load
from ckptsync.config.schema import Config
from ckptsync.events.due import TRIES, DueEvent, DueEvents, Occurrence
from ckptsync.head.due_jobs import Job
from ckptsync.service import head_roles
from ckptsync.service.head_roles import Catalogues, HeadRoles, catalogue_lines, repeated
from ckptsync.service.tasks import Task
from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import create_store
from ckptsync.verifier.verification import VerifyOptions
from tests.support.filled_stores import two_nodes
from tests.support.head_in_process import consolidate_due
from tests.support.scheduled_verification import verify_scheduled
from tests.support.small_store import SHARD, flip, make, make_two
from tests.support.waiting import until
from tests.support.worker_in_process import push_now

DATA = Path(ckptsync.__file__).parent / "demo_data"
PATIENCE = 300


def configured(path: Path, more: str = "") -> tuple[Config, Store]:
    store = create_store(str(path))
    file = path.with_name(f"{path.name}.yaml")
    file.write_text(f"roles: [head, verifier]\nstore: {{url: {path}}}\n{more}")
    return load(file, {}), store


def fail(e: BaseException) -> None:
    raise e


def arrive(store: Store, *runs: str) -> None:
    for run in runs:
        for node in ("node0", "node1"):
            push_now(DATA / run / node, store, node, run)


def word(store: Store) -> list[str]:
    return [snapshot.status for snapshot in read_state(store).readable]


def works_of(heads: HeadRoles) -> tuple[Task, ...]:
    """But for the look at everything."""
    return tuple(heads.tasks[:-1])


def works(heads: HeadRoles, store: Store, wanted: list[str]) -> bool:
    """Whether this comes to be, when every tick runs as often as its hints ask for."""
    asked = [1]
    for role in works_of(heads):
        role.wake = lambda: asked.append(1)

    def is_so() -> bool:
        if asked and not heads.jobs.running():
            asked.clear()
            for role in works_of(heads):
                role()
        return word(store) == wanted

    return until(is_so, PATIENCE)


def test_what_is_complete_is_consolidated_and_proved_as_soon_as_children_end(
    tmp_path: Path,
) -> None:
    config, store = configured(tmp_path)
    arrive(store, "fsdp2", "zero3")
    heads = HeadRoles(config, "head", store, fail)
    assert works(heads, store, ["VERIFIED", "VERIFIED"])
    assert [role.errors() for role in works_of(heads)] == [(), ()]


def test_what_fails_is_told_with_its_hint_and_waits_and_holds_up_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, store = configured(tmp_path, "head: {config_from: {fsdp2: /nowhere}}\n")
    arrive(store, "fsdp2", "zero3")
    heads = HeadRoles(config, "head", store, fail)
    assert works(heads, store, ["COMPLETE", "VERIFIED"])
    [head, _] = works_of(heads)
    assert until(lambda: not heads.jobs.running(), PATIENCE)
    head()
    [error] = head.errors()
    assert error.startswith("fsdp2/checkpoint-4: /nowhere: no such file or directory (`ckptsync ")
    code = main(shlex.split(error.partition("`")[2].rstrip("`)"))[1:])
    assert (code, "/nowhere: no such file" in capsys.readouterr().err) == (2, True), "as pasted"
    assert any("hint=" in line.text for line in head.outcome.lines if line.level == "error")
    head()
    assert heads.jobs.running() == (), "it is not tried again at once"


def test_what_the_rules_let_go_of_is_marked_by_a_child(tmp_path: Path) -> None:
    config, store = configured(tmp_path, "retention: {runs: {fsdp2: {keep_last: 1}}}\n")
    make_two(tmp_path)
    heads = HeadRoles(config, "head", store, fail)
    assert [role.name for role in works_of(heads)] == ["head", "verifier", "retention"]
    works_of(heads)[2]()
    assert until(lambda: list(tmp_path.glob("fsdp2/.ckptsync/checkpoint-4/tombstone-*")), PATIENCE)
    assert until(lambda: not heads.jobs.running(), PATIENCE)
    assert works_of(heads)[2].errors() == ()
    assert not list(tmp_path.glob("fsdp2/.ckptsync/checkpoint-5/tombstone-*"))


def test_damage_is_a_status_of_its_location_and_no_error_once_somebody_else_has_proven_its_repair(
    tmp_path: Path,
) -> None:
    config, store = configured(make(tmp_path))
    heads = HeadRoles(config, "head", store, fail)
    [_, verifier] = works_of(heads)
    whole = (tmp_path / "fsdp2" / SHARD).read_bytes()
    flip(tmp_path / "fsdp2" / SHARD)
    heads.jobs.begin("verify", [Job("verify", "fsdp2", "checkpoint-4", level="digest")])
    assert until(lambda: not heads.jobs.running(), PATIENCE)
    assert word(store) == ["DAMAGED", "INCOMPLETE"]
    (tmp_path / "fsdp2" / SHARD).write_bytes(whole)
    verify_scheduled(store, "fsdp2", "checkpoint-4", VerifyOptions("digest"))
    assert word(store) == ["VERIFIED", "INCOMPLETE"]
    verifier()
    assert verifier.errors() == ()
    assert until(lambda: not heads.jobs.running(), PATIENCE)
    manifest = next((tmp_path / "zero3/.ckptsync/checkpoint-4").glob("manifest-*"))
    manifest.write_bytes(b"x")
    for task in works_of(heads):
        task()
        assert any(manifest.name in error for error in task.errors())


def test_a_model_is_completed_again_when_a_file_of_config_from_has_changed(tmp_path: Path) -> None:
    directory = tmp_path / "base"
    directory.mkdir()
    more = f"head: {{config_from: {{fsdp2: {directory}}}}}\n"
    config, store = configured(tmp_path / "store", more)
    arrive(store, "fsdp2")
    consolidate_due(store)
    heads, keys = HeadRoles(config, "head", store, fail), list[str]()
    heads.jobs.begin = lambda _, jobs: keys.extend(job.key for job in jobs) or ()  # type: ignore[assignment,func-returns-value,method-assign]
    file = directory / "config.json"
    for text, mtime in (("{}", 1), ("{}", 1), ("{}", 2), ("{ }", 2)):
        file.write_text(text)
        os.utime(file, (mtime, mtime))
        heads.consolidate()
    assert [keys.index(key) for key in keys] == [0, 0, 2, 3]


def test_an_event_that_is_given_up_is_an_error_and_says_how_to_repeat_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "events: [{name: eval, on: [verified], command: [/bin/false]}]\n"
    config, store = configured(tmp_path / "store", more)
    happened = Occurrence("verified", "report-1", 1.0)
    event = DueEvent(config.events[0], "a b", "checkpoint-4", happened, TRIES, "no GPU")
    monkeypatch.setattr(head_roles, "due_events", lambda *_: DueEvents(given_up=(event,)))
    heads = HeadRoles(config, "head", store, fail)
    outcome, [entry] = heads.consolidate(), heads.running()
    command = "`ckptsync events run 'a b/checkpoint-4' eval -c FILE` runs it by hand"
    assert (entry.state, entry.hint) == ("failed", command)
    assert entry.reason == f"given up after {TRIES} tries: no GPU"
    [line] = outcome.lines
    assert (line.level, "phase=given-up" in line.text, command in line.text) == (
        "error",
        True,
        True,
    )
    [error] = outcome.errors
    assert error.endswith(": given up: no GPU")


def test_what_one_task_has_read_another_need_not_read_again_and_is_seldom_saved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    saved: list[object] = []
    monkeypatch.setattr(Cache, "save", lambda *url: saved.append(url))
    store = MemoryStore()
    catalogues = Catalogues(store)
    before = catalogues.read()
    two_nodes(store)
    assert catalogues.read(60.0) is before
    assert [s.location for s in catalogues.read().summaries] == ["checkpoint-4"]
    assert len(saved) == 1


def test_apscheduler_asks_for_each_task_again_and_again_until_the_block_ends() -> None:
    wakes: list[str] = []
    tasks = [Task(name, every, lambda: None, print) for name, every in (("a", 0.2), ("b", 3600.0))]
    for task in tasks:
        task.due, task.wake = math.inf, partial(wakes.append, task.name)
    with repeated(tasks):
        assert until(lambda: wakes.count("a") >= 3)
    assert [task.due <= time.monotonic() for task in tasks] == [True, False]
    count = len(wakes)
    assert not until(lambda: len(wakes) > count + 1, 0.8), "but for one that was under way"


def test_each_location_is_told_and_what_cannot_be_read() -> None:
    store = MemoryStore()
    two_nodes(store)
    [line] = catalogue_lines(read_catalogue(store))
    assert line.text == "phase=complete run=run location=checkpoint-4"
    name = next(e.name for e in store.names("run/.ckptsync/"))
    store.write(name, [b"x"])
    lines = catalogue_lines(read_catalogue(store))
    assert any(line.level == "error" and name in line.text for line in lines)
