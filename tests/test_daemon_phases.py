"""One log line for each change."""

import pytest

from ckptsync.daemon.phases import Line, changed, fields, pairs


def test_a_line_is_said_when_it_changes_and_again_when_it_comes_back() -> None:
    waiting, sent = Line("a", "phase=waiting"), Line("a", "phase=sent")
    said: dict[str, str] = {}
    told = []
    for now in ([waiting], [waiting], [sent], [], [waiting], [waiting, Line("b", "x")]):
        lines, said = changed(said, now)
        told.append([line.text for line in lines])
    assert told == [["phase=waiting"], [], ["phase=sent"], [], ["phase=waiting"], ["x"]]


def test_pairs_are_quoted_where_they_must_be() -> None:
    assert pairs(phase="sent", run="a", detail="not yet", empty="", none=None, zero=0) == 'phase=sent run=a detail="not yet" zero=0'
    assert pairs(x='say "a\\b"') == 'x="say \\"a\\\\b\\""'


@pytest.mark.parametrize("value", ["x", "a b", 'say "a\\b"', "a=b", "new\nline", "\\", '"', "0"])
def test_pairs_are_read_back_as_they_were_given(value: str) -> None:
    assert fields(pairs(phase="sent", detail=value, last=value)) == {"phase": "sent", "detail": value, "last": value}


@pytest.mark.parametrize("text", ["", "not a pair", "phase=sent and more", "a=1  b=2"])
def test_a_text_that_is_something_else_is_not_taken_for_pairs(text: str) -> None:
    assert fields(text) is None
