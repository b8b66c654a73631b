"""What `make fuzz` has found, each tried again; and the campaign itself finds what is wrong."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest

from ckptsync.errors import Corrupt
from tests.campaigns import fuzz
from tests.campaigns.fuzz import KEPT, Case, Door, Wrong, again, judge

FOUND = sorted(KEPT.rglob("*.json"))


@pytest.mark.parametrize("path", FOUND, ids=[path.relative_to(KEPT).as_posix() for path in FOUND])
def test_what_was_found_is_mended(path: Path) -> None:
    assert again(path) == ""


def _hostile(case: Case, home: Path) -> str:
    what = case["what"]
    if what == "refused":
        raise Corrupt("refused")
    if what == "traceback":
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "of ours")
    if what == "wrong":
        raise Wrong("another tensor")
    if what == "dies":
        os._exit(3)
    if what == "memory":
        return str(len(bytearray(500 << 20)))
    if what == "slow":
        end = time.process_time() + 1.2
        while time.process_time() < end:
            pass
    if what == "reads":
        (home / "outside" / "secret").read_bytes()
    if what == "writes":
        (home / "given" / ".." / "elsewhere").write_bytes(b"")
    if what == "link":
        (home / "given" / "a").symlink_to(home / "outside" / "secret")
        (home / "given" / "a").write_bytes(b"")
    return "fine"


@pytest.mark.parametrize(
    ("what", "word", "report"),
    [
        ("fine", "fine", ""),
        ("refused", "refused 10", ""),
        ("traceback", "FOUND", "UnicodeDecodeError"),
        ("wrong", "FOUND", "wrong: another tensor"),
        ("dies", "FOUND", "died"),
        ("memory", "FOUND", "memory"),
        ("slow", "FOUND", "slow"),
        ("reads", "FOUND", "outside"),
        ("writes", "FOUND", "elsewhere"),
        ("link", "FOUND", "outside"),
    ],
)
def test_a_case_is_judged(what: str, word: str, report: str, tmp_path: Path) -> None:
    door = Door(lambda _: {}, _hostile, ("given",), seconds=1.0 if what == "slow" else 60.0)
    judged = judge(door, {"what": what}, tmp_path)
    assert judged[0] == word
    assert report in judged[1]


@pytest.mark.parametrize("name", fuzz.DOORS)
def test_every_door_makes_cases_that_can_be_kept(name: str) -> None:
    door = fuzz.door_of(name)
    for seed in range(5):
        case = door.make(random.Random(seed))
        assert fuzz.decoded(fuzz.encoded(case)) == case


def test_of_findings_of_one_kind_the_smallest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(case: Case, home: Path) -> str:
        if sum(case["what"]) > 10:
            raise Wrong("too many")
        return "fine"

    door = Door(lambda dice: {"what": [9] * dice.randrange(9)}, run)
    monkeypatch.setattr(fuzz, "door_of", lambda _: door)
    ((case, _),) = fuzz.search("sums", "1", 3.0)[1].values()
    assert case["what"] == [9, 9]
