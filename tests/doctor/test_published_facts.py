import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ckptsync.doctor import published_facts
from ckptsync.doctor.checks import compare
from ckptsync.doctor.published_facts import (
    FOLDER,
    Arrived,
    group_jobs,
    group_trainings,
    launch_name,
    meet,
    publish,
    read_living,
    read_published,
    repeat_findings,
)
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.status import heartbeat
from ckptsync.status.heartbeat import LIMIT, Facts, Heartbeat, Train
from ckptsync.stores.contract import Store
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore
from tests.doctor.nodes import pair
from tests.support.waiting import until

HOOK = {
    "python": "3.11.4",
    "torch": "2.8.0",
    "transformers": "4.57.1",
    "cuda": "12.8",
    "NCCL_IB_DISABLE": "0",
    "NNODES": "2",
    "nvidia-nccl-cu12": "2.27.3",
    "tied": "a=b",
}


def facts(node: str, boot: str, **train: Any) -> Facts:
    told = {"trainer": "t", "world": 4, "local_world": 2, "began": 1.0, "facts": HOOK}
    trains = {"run": Train(**{**told, "state": "runs", **train})}
    versions = ("0022", "0.1.0", "3.12.0", "6.1")
    return Facts(node, node, f"{boot} pid:[1]", "train", *versions, trains=trains, clock_offset=0)


def test_what_nodes_say_is_read_back_by_their_names_in_the_store() -> None:
    store, (first, second) = MemoryStore(), pair()
    for node in (first, {**second, "at": 1.0}):
        publish(store, node)
    publish(store, {**first, "python": "3.12.0"})
    (store_now,) = {max(entry.mtime for entry in store.names(FOLDER))}
    found, odd = read_published(store, store_now)
    assert ([f["node"] for f in found], found[0]["python"], odd) == (["n0", "n1"], "3.12.0", [])
    assert read_published(store, store_now + 3700.0) == ([], [])


def test_a_node_cannot_speak_for_another_and_what_is_odd_is_told() -> None:
    store = MemoryStore()
    store.write(launch_name("n0"), [b'{"node": "n9", "versions": {"torch": "1"}}'])
    too_large = b" " * (LIMIT + 1)
    digits = b'{"at":' + b"9" * 5000 + b"}"
    wrong = (b"[1]", b'{"host":"\xff"}', digits, b"[" * 100_000, too_large)
    for n, data in enumerate(wrong, 1):
        store.write(launch_name(f"n{n}"), [data])
    found, odd = read_published(store, 0.0, 1e12)
    assert [f["node"] for f in found] == ["n0"]
    names = [launch_name(f"n{n}") for n in range(1, len(wrong) + 1)]
    assert [str(e).split(":")[0] for e in odd] == names
    with pytest.raises(Corrupt):
        launch_name("../x")


def test_two_machines_under_one_id_are_found_by_the_stores_clock_and_a_rebooted_one_is_not(
    tmp_path: Path,
) -> None:
    store, node, now = PosixStore(str(tmp_path)), pair()[0], time.time()
    publish(store, {**node, "at": now, "booted": now - 500})
    publish(store, {**node, "at": now, "booted": now - 30, "boot": "again"})
    for ahead in (0.0, 7200.0, -7200.0):
        times = {"at": now + ahead, "booted": now + ahead - 1000, "clock": ahead}
        with pytest.raises(ConfigError, match="another machine"):
            publish(store, {**node, **times, "boot": "clone"})


def test_a_node_that_another_machine_took_over_an_hour_ago_is_that_machine(tmp_path: Path) -> None:
    store, node, now = PosixStore(str(tmp_path)), pair()[0], time.time()
    publish(store, {**node, "at": now, "booted": now - 500})
    os.utime(tmp_path / launch_name("n0"), (now - 4000, now - 4000))
    publish(store, {**node, "at": now, "booted": now - 10**6, "boot": "rescheduled"})
    assert [one["boot"] for one in read_published(store, now)[0]] == ["rescheduled"]


def test_nodes_of_a_run_that_trains_are_compared_by_what_their_hooks_say() -> None:
    told = group_trainings([facts("n0", "a"), facts("n1", "b")])
    assert list(told) == ["run"]
    assert compare(told["run"]) == ()
    versions = {"torch": "2.8.0", "transformers": "4.57.1", "nccl": "2.27.3"}
    assert told["run"][0]["versions"] == versions
    other = facts("n1", "b", facts={**HOOK, "torch": "2.7.1", "NCCL_IB_DISABLE": "1"})
    nodes = [facts("n0", "a"), replace(other, clock_offset=40 * 10**9)]
    found = [f"{f.kind} {f.subject}" for f in compare(group_trainings(nodes)["run"])]
    different = ["network-differs NCCL_IB_DISABLE", "versions-differ torch"]
    assert found == ["clock the clock"] * 2 + different
    (odd,) = group_trainings([replace(facts("n0", "a"), clock_offset=10**400)])["run"]
    assert odd["clock"] is None
    for state in ("ended", "gone"):
        assert group_trainings([facts("n0", "a", state=state)]) == {}


def test_only_nodes_whose_workers_live_count_as_training() -> None:
    store = MemoryStore()
    for node in ("n0", "n1", "gone"):
        heartbeat.write_facts(store, facts(node, node), ("worker",))
        beat = Heartbeat(node, "i", "m", 1, "b", 0.0, ("worker",), "0")
        heartbeat.write(store, replace(beat, stopped=node == "gone"))
    now = max(entry.mtime for entry in store.names(".ckptsync/nodes/"))
    assert [told.node for told in read_living(store, now)] == ["n0", "n1"]
    assert read_living(store, now + 3700.0) == []


def test_nodes_of_one_job_are_together_and_one_that_trains_alone_is_alone() -> None:
    first, second = pair()
    other = {**first, "node": "n2", "job": "7"}
    single = {**first, "node": "n3", "variables": {"NNODES": "1"}}
    groups = group_jobs([first, other, second, single])
    assert [[one["node"] for one in group] for group in groups] == [["n0", "n1"], ["n2"], ["n3"]]
    assert compare(groups[0]) == compare(groups[2]) == ()


def test_gpus_of_two_kinds_are_found_while_they_train_and_their_numbers_are_not_judged() -> None:
    def found(gpu: str) -> list[str]:
        first, second = facts("n0", "a"), replace(facts("n1", "b"), gpus=(gpu,) * 4)
        nodes = [replace(first, gpus=("H200",) * 8), second]
        return [f.kind for f in compare(group_trainings(nodes)["run"])]

    assert (found("L4"), found("H200")) == (["gpus-mixed"], [])


def test_what_is_no_text_is_published_as_well_as_it_can_be() -> None:
    store = MemoryStore()
    odd = {"node": "n0", "host": "\u00e9"}
    publish(store, {**odd, "job": "a\udcff", "variables": {"NCCL_IB_HCA": "\udcff"}})
    read = [{**odd, "job": "a?", "variables": {"NCCL_IB_HCA": "?"}}]
    assert read_published(store, 0.0, 1e12) == (read, [])


def waits(
    store: Store, *nodes: dict[str, Any], wanted: int = 2, seconds: float = 60.0
) -> list[Arrived | ConfigError]:
    """What each of some nodes that wait for each other at once comes to."""

    def one(node: dict[str, Any]) -> Arrived | ConfigError:
        try:
            return meet(store, {**node, "at": time.time()}, wanted, seconds)
        except ConfigError as e:
            return e

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, nodes))


def names(arrived: Arrived | ConfigError) -> list[str]:
    assert isinstance(arrived, Arrived)
    return [one["node"] for one in arrived.nodes]


def test_nodes_that_wait_for_different_numbers_wait_for_the_greater_and_see_each_other(
    tmp_path: Path,
) -> None:
    store = PosixStore(str(tmp_path))
    with ThreadPoolExecutor() as pool:
        waiting = [
            pool.submit(waits, store, node, wanted=wanted, seconds=8.0)
            for node, wanted in zip(pair(), (2, 3), strict=True)
        ]
        found = [one for each in waiting for one in each.result()]
    assert [names(one) for one in found] == [["n0", "n1"]] * 2
    for one in found:
        assert isinstance(one, Arrived)
        assert (one.expected, one.is_complete) == (3, False)


def test_a_node_that_comes_does_not_shorten_the_wait_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published_facts, "_SETTLE", 0.0)
    monkeypatch.setattr(published_facts, "_POLL", 0.05)
    store, third = PosixStore(str(tmp_path)), {**pair()[1], "node": "n2"}
    with ThreadPoolExecutor() as pool:
        early = [pool.submit(waits, store, pair()[0], wanted=3)]
        assert not until(early[0].done, 0.3)
        early.append(pool.submit(waits, store, pair()[1], wanted=3))
        assert until(lambda: [n for n in read_published(store, 0.0)[0] if n["call"]["read"]])
        assert not until(lambda: any(one.done() for one in early), 0.5)
        assert names(*waits(store, third, wanted=3)) == ["n0", "n1", "n2"]
        assert [len(names(*one.result())) for one in early] == [3, 3]


def test_two_machines_that_wait_under_one_id_both_find_out(tmp_path: Path) -> None:
    node = pair()[0]
    found = waits(PosixStore(str(tmp_path)), node, {**node, "host": "clone", "boot": "other"})
    assert [str(one) for one in found] == [
        "node n0: another machine (clone) has published under this id, too",
        f"node n0: another machine ({node['host']}) has published under this id, too",
    ]


def test_an_odd_call_or_finding_of_another_node_is_none(tmp_path: Path) -> None:
    store, node = PosixStore(str(tmp_path)), pair()[0]
    unread = {"id": "b", "read": 1, "nnodes": "x"}
    for n, call in enumerate((1, {"id": 1}, {"id": "a"}, unread, {"id": "c", "read": [1]})):
        publish(store, {"node": f"odd{n}", "call": call, "findings": call})
    (arrived,) = waits(store, node, wanted=1)
    assert names(arrived) == ["n0"]
    texts = {"subject": "s", "what": "w", "why": "y", "hint": "h"}
    right = {"level": "warn", "kind": "x", "nodes": ["n9"], "exit_code": 4, **texts}
    wrong: list[object] = [1, {}, {"kind": "a b"}, {**right, "exit_code": 0}]
    wrong.append({"kind": "x", "level": "fail", "exit_code": 2})  # without its texts
    told: list[dict[str, Any]] = [
        {"node": "n1", "findings": [*wrong, right]},
        {"node": "n2", "findings": "x"},
    ]
    (one,) = repeat_findings(told)
    assert (one.kind, one.nodes, one.exit_code) == ("x", ("n1",), 4)
