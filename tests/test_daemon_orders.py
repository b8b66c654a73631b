from dataclasses import replace

import pytest

from ckptsync.config.loading import read
from ckptsync.daemon.orders import At, Brief, Done, Failed, Order, brief, encode, failure, message
from ckptsync.daemon.phases import Line
from ckptsync.errors import Corrupt, Transient

FULL = """\
roles: [head]
store: {url: "s3://b/x", options: {s3: {key: x, deep: [1, 2.5, null]}}}
limits: {bandwidth: "08:00,50M 19:00,off"}
head: {config_from: {"*": /base}}
retention: {keep_best: "eval_loss:2", runs: {a: {keep_best: "max:x:2", shards: "drop-after:3", max_age: 3d}, b: {shards: keep}}}
"""


def test_a_brief_is_what_it_was_after_the_journey() -> None:
    config = read(FULL, "c", {})
    given = Brief(Order("verify", "run", "location", 5, "parse", 1.5), config, 7)
    assert brief(encode(given)) == given
    assert brief(encode(given)).config.retention.of("a") == config.retention.of("a")


@pytest.mark.parametrize(
    "said", [At(1, 2), Done((Line("k", "t", is_error=True),), ("e",), changed=True), Failed("text\n…", "hint", 4, passes=True)]
)
def test_a_message_is_one_line_and_what_it_was_after_the_journey(said: At | Done | Failed) -> None:
    assert encode(said).count(b"\n") == 1
    assert message(encode(said)) == said


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b"null",
        b'{"type":"at","done":"x"}',
        b"[" * 100_000,
        b"\xff",
        b'{"type":"order"}',
        b'{"type":"done","lines":[],"errors":["\xff"]}',
    ],
)
def test_what_is_no_message_is_none(line: bytes) -> None:
    assert message(line) is None


def test_errors_of_a_store_pass_by_themselves_and_others_do_not() -> None:
    assert failure(Transient("away", hint="wait")) == Failed("away", "wait", 4, passes=True)
    assert failure(Corrupt("bad")) == Failed("bad", "", 10)


def test_what_people_are_told_is_the_location_or_the_run() -> None:
    order = Order("consolidate", "run", "location")
    assert (order.subject, Order("consolidate", "run").subject) == ("run/location", "run")
    assert replace(read(FULL, "c", {}), node="x") != read(FULL, "c", {})
