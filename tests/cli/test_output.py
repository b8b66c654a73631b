"""What a command prints."""

import json
import unicodedata
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckptsync.cli.output import CODES, aligned, clean, painted, print_json, print_table


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    names: frozenset[str]


def test_columns_line_up_and_the_last_is_not_padded() -> None:
    assert aligned([["a", "bb", "c"], ["aaa", "b", "cc"]]) == ["a    bb  c", "aaa  b   cc"]
    assert aligned([]) == []


def test_what_a_name_holds_does_not_reach_the_terminal() -> None:
    assert clean("a\x1b[2J\nb\u202e") == "a\\x1b[2J\\nb\\u202e"
    assert all(unicodedata.category(c)[0] != "C" for c in aligned([["\r", "\x07"]])[0])


def test_only_a_word_that_stands_alone_is_coloured() -> None:
    assert painted("run  VERIFIED  ok") == f"run  \x1b[{CODES['VERIFIED']}mVERIFIED\x1b[0m  ok"
    assert painted("run/UNVERIFIED ok") == "run/UNVERIFIED ok"


def test_off_a_terminal_there_is_no_colour(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["RUN", "WORD"], [["a", "DAMAGED"]])
    assert capsys.readouterr().out == "RUN  WORD\na    DAMAGED\n"


def test_json_is_one_line_of_plain_values(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"p": Point(1, frozenset("b")), "path": Path("/x"), "text": "é\n"})
    out = capsys.readouterr().out
    assert json.loads(out) == {"p": {"x": 1, "names": ["b"]}, "path": "/x", "text": "é\n"}
    assert out.count("\n") == 1
    assert out.isascii()
