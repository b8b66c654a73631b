"""One event is done and remembered in the store; a claim keeps another head from it."""

import itertools
import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.location_summary import Summary
from ckptsync.cli.events import describe
from ckptsync.cli.main import main
from ckptsync.errors import CkptsyncError, ConfigError, Incomplete
from ckptsync.events.definitions import Definition
from ckptsync.events.due import due_events
from ckptsync.events.handling import Elsewhere, HandledEvent, Request, handle, register_events
from ckptsync.head.gc import TrainerMetrics
from ckptsync.spool.markers import start_time
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import open_store
from tests.support.small_store import make

MODEL = "fsdp2/checkpoint-4"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("made") / "store")


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Store:
    shutil.copytree(made, tmp_path / "store")
    return open_store(str(tmp_path / "store"))


def event(script: str, *words: str, name: str = "eval", on: str = "verified") -> Definition:
    return Definition(name, (on,), ("/bin/sh", "-c", script, "sh", *words))  # type: ignore[arg-type]


def do(
    store: Store,
    definition: Definition,
    where: str = MODEL,
    *,
    happened: str = "",
    is_due: bool = True,
    node: str = "n",
) -> HandledEvent:
    run, _, location = where.partition("/")
    request = Request(definition, run, location, happened, is_due=is_due, node=node)
    return handle(store, request, lambda s: describe(store, s), lambda: None)


def here(store: Store) -> Summary:
    return next(s for s in read_catalogue(store).summaries if s.run == "fsdp2")


def test_it_is_done_once_and_again_by_hand(store: Store, tmp_path: Path) -> None:
    definition = event("""cat >>$1; echo '{"eval/acc": 0.5}'""", str(tmp_path / "given"))
    assert do(store, definition).metrics == {"eval/acc": 0.5}
    assert do(store, definition).was_done
    assert do(store, definition, node="other").was_done
    assert (tmp_path / "given").read_text().count('"event": "verified"') == 1
    assert not do(store, definition, is_due=False).was_done
    assert (tmp_path / "given").read_text().count('"loss": ') == 2
    [handled] = here(store).handled
    assert (handled.name, handled.done, handled.failures) == ("eval", True, 0)
    assert here(store).metrics == (("eval/acc", 0.5),)


def test_a_command_is_told_what_ls_prints(
    store: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    definition = replace(event(f"cat >{tmp_path}/told"), on=("consolidated", "verified"))
    for happened, last in (("consolidated", "consolidated"), ("", "verified")):
        do(store, definition, happened=happened)
        told = json.loads((tmp_path / "told").read_text())
        assert told["event"] == last
    capsys.readouterr()
    assert main(["ls", MODEL, "--store", str(tmp_path / "store"), "--json"]) == 0
    assert told.keys() == json.loads(capsys.readouterr().out).keys() | {"event", "name"}


def test_arguments_say_where_it_lies(store: Store, tmp_path: Path) -> None:
    words = ("{run}", "{checkpoint}", "{step}", "{location}", "{path}", "{model}", "{url}")
    do(store, event("""for w; do echo "$w"; done >/dev/stderr; exit 0""", *words))
    script = 'printf "%s\\n" "$@" >' + str(tmp_path / "told")
    do(store, event(script, *words, name="other"))
    root = tmp_path / "store"
    assert (tmp_path / "told").read_text().splitlines() == [
        "fsdp2",
        "checkpoint-4",
        "4",
        "checkpoint-4",
        f"{root}/fsdp2/checkpoint-4",
        f"{root}/fsdp2/consolidated/checkpoint-4",
        f"{root}/fsdp2/checkpoint-4",
    ]


def test_a_failure_is_remembered_and_the_next_try_may_succeed(store: Store, tmp_path: Path) -> None:
    definition = event("echo no >&2; test -e $1", str(tmp_path / "fixed"))
    for failures in (1, 2):
        with pytest.raises(CkptsyncError, match=r"eval \(verified\): ended with status 1: no"):
            do(store, definition)
        [handled] = here(store).handled
        assert (handled.done, handled.failures, handled.error) == (
            False,
            failures,
            "ended with status 1: no",
        )
    (tmp_path / "fixed").write_text("")
    assert not do(store, definition).was_done
    [handled] = here(store).handled
    assert (handled.done, handled.failures) == (True, 2)


def test_a_program_that_is_not_there_fails(store: Store) -> None:
    definition = Definition("gone", ("verified",), ("/nowhere/program",))
    with pytest.raises(CkptsyncError, match="/nowhere/program: No such file"):
        do(store, definition)


def test_why_metrics_were_refused_is_remembered(store: Store) -> None:
    do(store, event("""echo '{"a": NaN}'"""))
    [handled] = here(store).handled
    assert (handled.done, handled.error) == (True, "metrics refused: a is nan")


def test_what_did_not_happen_is_not_done(store: Store) -> None:
    with pytest.raises(Incomplete, match="never damaged"):
        do(store, event("exit 0", on="damaged"))
    with pytest.raises(Incomplete, match="it is INCOMPLETE, and was never verified"):
        do(store, event("exit 0"), "zero3/checkpoint-4")
    with pytest.raises(ConfigError, match="not found"):
        do(store, event("exit 0"), "fsdp2/checkpoint-9")


def test_a_live_claim_of_another_head_is_left_to_it(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = event("exit 0")
    claim = ".ckptsync/events/eval/verified/fsdp2/checkpoint-4"
    store.write(claim, [b"other 999999999 7\n"])
    with pytest.raises(Elsewhere, match="other does it"):
        do(store, definition)
    assert not here(store).handled
    monkeypatch.setattr("ckptsync.events.handling.STALE", 0.0)  # its head is dead
    assert not do(store, definition).was_done
    monkeypatch.undo()
    for killed in (b"n\n", b"n 999999999 7\n"):  # of this node
        store.write(claim, [killed])
        assert do(store, definition).was_done
    # another process of this node is at it: the one that has started this one
    parent = os.getppid()
    store.write(claim, [f"n {parent} {start_time(parent)}\n".encode()])
    with pytest.raises(Elsewhere, match="n does it"):
        do(store, definition)
    # this very process, which did not hear that its claim was written
    store.write(claim, [f"n {os.getpid()} {start_time(os.getpid())}\n".encode()])
    assert do(store, definition).was_done
    assert not list(store.names(".ckptsync/events/"))
    assert not (tmp_path / "store" / claim).exists()


def test_the_age_of_a_claim_is_on_the_clock_of_the_store(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim, past = ".ckptsync/events/eval/verified/fsdp2/checkpoint-4", time.time() - 9e6
    store.write(claim, [b"other\n"])
    os.utime(tmp_path / "store" / claim, (past, past))
    monkeypatch.setattr("ckptsync.events.handling.store_now", lambda _: past + 1.0)
    with pytest.raises(Elsewhere, match="other does it"):
        do(store, event("exit 0"))


def test_a_claim_is_written_again_now_and_then_while_its_program_runs(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = itertools.count(0, 10)  # REFRESH is 20 seconds
    clock = SimpleNamespace(monotonic=lambda: next(moments), time=time.time)
    monkeypatch.setattr("ckptsync.events.handling.time", clock)
    claim = tmp_path / "store/.ckptsync/events/eval/verified/fsdp2/checkpoint-4"
    end, times = tmp_path / "end", list[float]()

    def beat() -> None:
        times.append(claim.stat().st_mtime)
        os.utime(claim, (1, 1))
        if len(times) == 5:
            end.touch()

    request = Request(
        event("until [ -e $1 ]; do sleep 0.1; done", str(end)), "fsdp2", "checkpoint-4", node="n"
    )
    assert not handle(store, request, lambda s: describe(store, s), beat).was_done
    assert [moment > 1 for moment in times[:5]] == [True, True, False, True, False]


def test_a_location_that_was_deleted_meanwhile_gets_no_record(store: Store, tmp_path: Path) -> None:
    records = tmp_path / "store/fsdp2/.ckptsync/checkpoint-4"
    do(store, event("rm $1/manifest-*", str(records)))
    assert list(records.iterdir())
    assert not list(records.glob("event-*"))


def test_a_head_remembers_since_when_it_has_an_event(store: Store, tmp_path: Path) -> None:
    definition = event("exit 0")
    since = register_events(store, [definition])
    assert register_events(store, [definition]) == since
    assert not due_events([definition], read_catalogue(store).summaries, since).now
    # a clock that was ahead as it was written, and is right now
    [name] = [entry.name for entry in store.names(".ckptsync/events/")]
    later = time.time() + 9e6
    os.utime(tmp_path / "store" / name, (later, later))
    assert abs(register_events(store, [definition])["eval", "verified"] - time.time()) < 1e6
    before = dict.fromkeys(since, 0.0)
    [due] = due_events([definition], read_catalogue(store).summaries, before).now
    assert (due.location, due.happened.at) == ("checkpoint-4", here(store).proof.first)


def test_keep_best_reads_what_events_measured_and_waits_for_what_they_will(store: Store) -> None:
    do(store, event("""echo '{"eval/acc": 0.5, "loss": 0.25}'"""))
    s = here(store)
    past = replace(s, arrived=s.arrived - 9, merged=s.arrived - 8, metrics=())
    earlier = replace(past, location="earlier", proof=replace(s.proof, first=s.arrived - 7))
    mended = replace(past, location="mended", proof=replace(s.proof, first=s.arrived + 9))
    later = replace(s, location="later", arrived=s.arrived + 9, metrics=())
    metrics = TrainerMetrics(store)
    # what arrived, or was verified, after all that was measured had arrived may yet be
    values = {"checkpoint-4": 0.5, "mended": None, "later": None}
    assert metrics.values([earlier, mended, s, later], "eval/acc") == values
    assert metrics.values([earlier, s, later], "nothing") == {}
    assert metrics.values([s], "loss") == {"checkpoint-4": 0.25}
