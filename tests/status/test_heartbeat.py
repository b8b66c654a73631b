"""A node's heartbeat and facts, and two workers under one id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt
from ckptsync.status import heartbeat
from ckptsync.status.heartbeat import Facts, Heartbeat, Train, facts_name, write_facts
from ckptsync.status.nodes import read_nodes
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.part_upload import UNBUFFERED
from ckptsync.stores.posix.store import PosixStore
from tests.support.status_examples import job, waiting

FIRST = Heartbeat("n0", "aa", "boot", 1, "100", 1000.0, ("worker",), "0")
SECOND = replace(FIRST, instance="bb", pid=2, started=2000.0)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return PosixStore(str(tmp_path))


def never(_seconds: float) -> None:
    raise AssertionError("nothing to wait for")


def test_a_heartbeat_reads_back_as_it_was_written(store: Store) -> None:
    work = replace(FIRST, running=waiting("run/checkpoint-4"), errors=("é\n",))
    mine = heartbeat.beat(store, work)
    assert heartbeat.read(store, "n0", ("worker",)) == mine
    [file] = read_nodes(store).hearts
    assert (file.entry.name, file.content) == (".ckptsync/nodes/n0.json", mine)
    assert mine.beat == 1


def test_a_heartbeat_and_facts_say_how_long_they_are_so_that_no_upload_delays_them() -> None:
    class Told(MemoryStore):
        def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
            super().write(name, chunks, about)
            told.append((about.size, len(read_all(self, name, 1 << 20))))

    told: list[tuple[int | None, int]] = []
    heartbeat.beat(Told(), FIRST)
    facts = Facts("n0", "host", "machine", "user", "0022", "1", "3", "6")
    write_facts(Told(), facts, ("worker",))
    assert [size for size, _ in told] == [length for _, length in told]
    assert all(length < UNBUFFERED for _, length in told)


def test_one_that_cannot_be_read_is_listed_as_its_error_and_overwritten(store: Store) -> None:
    store.write(".ckptsync/nodes/n0.json", [b"{broken"])
    [file] = read_nodes(store).hearts
    assert isinstance(file.content, Corrupt)
    mine = heartbeat.claim(store, FIRST, lambda _: True, never)
    assert mine == heartbeat.read(store, "n0", ("worker",))


def test_a_second_worker_on_one_machine_is_refused_at_once(store: Store) -> None:
    heartbeat.beat(store, FIRST)
    with pytest.raises(ConfigError, match="another live worker has this id"):
        heartbeat.claim(store, SECOND, lambda _: True, never)


def test_a_worker_takes_over_from_one_that_died_or_said_farewell(store: Store) -> None:
    mine = heartbeat.beat(store, replace(FIRST, running=waiting("run/checkpoint-4")))
    taken = heartbeat.claim(store, SECOND, lambda _: False, never)
    assert heartbeat.beat(store, taken).instance == SECOND.instance
    assert heartbeat.farewell(store, mine) is None
    last = replace(mine, beat=2, stopped=True, running=())
    assert heartbeat.read(store, "n0", ("worker",)) == last
    taken = heartbeat.claim(store, SECOND, lambda _: True, never)
    assert heartbeat.beat(store, taken).beat == 2


def test_another_machines_worker_is_alive_if_it_beats_while_we_wait(store: Store) -> None:
    mine = heartbeat.beat(store, FIRST)

    def beats(_: float) -> None:
        heartbeat.write(store, replace(mine, beat=2))

    with pytest.raises(ConfigError):
        heartbeat.claim(store, SECOND, lambda _: None, beats)
    waited: list[float] = []
    for period, most in ((FIRST.period, 75.0), (1e9, 750.0)):  # of a heartbeat that anyone wrote
        heartbeat.write(store, replace(mine, period=period))
        heartbeat.claim(store, SECOND, lambda _: None, waited.append)
        assert waited.pop() == most


def test_another_machines_worker_that_stops_while_we_wait_is_replaced(store: Store) -> None:
    mine = heartbeat.beat(store, FIRST)

    def stops(_: float) -> None:
        heartbeat.write(store, replace(mine, beat=2, stopped=True))

    def goes(_: float) -> None:
        store.delete(".ckptsync/nodes/n0.json")

    for ends in (stops, goes):
        heartbeat.write(store, mine)
        claimed = heartbeat.claim(store, SECOND, lambda _: None, ends)
        assert heartbeat.read(store, "n0", ("worker",)) == claimed


def test_of_two_that_started_at_once_exactly_the_second_stops(store: Store) -> None:
    first, second = heartbeat.beat(store, FIRST), replace(SECOND, started=FIRST.started, beat=7)
    heartbeat.write(store, second)
    heartbeat.beat(store, first)
    with pytest.raises(ConfigError):
        heartbeat.beat(store, second)


def test_heads_may_be_several_and_do_not_beat_under_a_workers_name(store: Store) -> None:
    head = replace(FIRST, roles=("head", "verifier"))
    heartbeat.beat(store, head)
    heartbeat.beat(store, replace(head, instance="cc", started=3000.0))
    assert heartbeat.read(store, "n0", ("worker",)) is None
    assert heartbeat.read(store, "n0", ("head",)) is not None


def test_a_queue_has_what_moves_first_and_nothing_that_has_failed() -> None:
    running = (
        *waiting("run/checkpoint-1", since=1.0),
        job("consolidate", "run/checkpoint-2", state="queued", since=3.0),
        *waiting("run/checkpoint-3", since=5.0, state="uploading"),
        job("verify", "run/checkpoint-4", state="failed"),
    )
    names = ("run/checkpoint-3", "run/checkpoint-1", "run/checkpoint-2")
    assert replace(FIRST, running=running).queue == names


def test_a_heart_with_too_much_to_say_can_still_be_read(store: Store) -> None:
    errors = tuple(f"run/checkpoint-{n}: {'no space left on device ' * 4}" for n in range(12_000))
    lacks = {f"report-{n}": tuple(f"checkpoint-1/{m}.bin" for m in range(200)) for n in range(300)}
    heartbeat.write(store, replace(FIRST, errors=errors, lacks=lacks))
    seen = heartbeat.read(store, FIRST.node, FIRST.roles)
    assert seen
    assert seen.errors[:100] == errors[:100]


TRAINS = {"run": Train("hf", 4, 2, 1.5, {"torch": "2.13"})}
WHO = ("n0", "host", "boot", "train", "0022", "0.1", "3.11", "6.1")
FACTS = Facts(*WHO, {"nofile": 1024}, {"/out": "ext4"}, (), TRAINS)


def test_facts_come_back_as_written_the_last_ones_stay_and_later_keys_are_ignored() -> None:
    store, name = MemoryStore(), facts_name("n0", ("worker",))
    write_facts(store, Facts("n0", "", "", "", "", "", "", ""), ("worker",))
    write_facts(store, FACTS, ("worker",))
    assert list(read_nodes(store).facts.values()) == [FACTS]
    store.write(name, [read_all(store, name, 9999).replace(b'"node"', b'"later":[1],"node"')])
    assert list(read_nodes(store).facts.values()) == [FACTS]


def test_a_head_without_a_worker_has_facts_of_its_own() -> None:
    assert facts_name("n0", ("worker", "head")) == ".ckptsync/nodes/n0~facts.json"
    assert facts_name("n0", ("head",)) == ".ckptsync/nodes/n0~head~facts.json"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"node": 1}'])
def test_what_cannot_be_read_is_told_and_holds_up_no_other(data: bytes) -> None:
    store = MemoryStore()
    write_facts(store, FACTS, ("worker",))
    store.write(".ckptsync/nodes/a~facts.json", [data])
    broken, good = read_nodes(store).facts.values()
    assert isinstance(broken, Corrupt)
    assert good == FACTS
