"""One line an event."""

import io
import json
import logging
import os
import pty
import re
import sys
import warnings
from collections.abc import Iterator

import pytest

from ckptsync.config.schema import LogConfig
from ckptsync.service.log import Line, changed, configure, fields, pairs


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    with warnings.catch_warnings():
        yield
    logging.captureWarnings(capture=False)
    root.handlers[:], root.level = before
    logging.getLogger("ckptsync").setLevel(logging.NOTSET)


def listening(form: str, level: str) -> io.StringIO:
    """Return where lines go from now on."""
    configure(LogConfig(level, form))
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    stream = io.StringIO()
    handler.setStream(stream)
    return stream


def logged(form: str, level: str, *events: tuple[int, str]) -> str:
    stream = listening(form, level)
    for number, message in events:
        logging.getLogger("ckptsync.worker.tick").log(number, message)
    return stream.getvalue()


def test_a_line_has_time_level_room_and_message() -> None:
    line = logged("text", "info", (logging.INFO, "phase=sent run=a"), (logging.DEBUG, "unseen"))
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ info worker\.tick phase=sent run=a\n", line
    )


def test_json_is_an_object_a_line() -> None:
    lines = logged("json", "debug", (logging.WARNING, "a\nb"), (logging.DEBUG, "c")).splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["a\nb", "c"]
    assert json.loads(lines[0])["level"] == "warning"


def test_json_has_each_pair_under_its_key_and_no_pair_forges_what_is_ours() -> None:
    text = pairs(phase="sent", run="a", detail="not yet", level="debug")
    event = json.loads(logged("json", "info", (logging.INFO, text)))
    assert (event["phase"], event["run"], event["detail"]) == ("sent", "a", "not yet")
    assert (event["level"], event["message"]) == ("info", text)


def test_without_a_word_of_the_operator_it_is_json_off_a_terminal_and_text_on_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent = (logging.INFO, "phase=sent")
    assert json.loads(logged("auto", "info", sent))["message"] == "phase=sent"
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert logged("auto", "info", sent).endswith("Z info worker.tick phase=sent\n")
    os.close(ours)


def test_a_warning_of_a_library_is_a_line_like_others() -> None:
    stream = listening("json", "info")
    warnings.simplefilter("always")
    warnings.warn("old\nways", UserWarning, stacklevel=1)
    assert "old\nways" in json.loads(stream.getvalue())["message"]


def test_a_librarys_debugging_and_late_ticks_of_the_scheduler_are_nobodys_business() -> None:
    stream = listening("text", "debug")
    assert not logging.getLogger("apscheduler.scheduler").isEnabledFor(logging.WARNING)
    logging.getLogger("botocore.auth").debug("Signature: 0123")
    logging.getLogger("botocore.auth").warning("seen")
    assert "0123" not in stream.getvalue()
    assert "seen" in stream.getvalue()


def test_no_name_forges_a_line_and_no_traceback_commands_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = logged("text", "info", (logging.INFO, "phase=sent name=a\nphase=verified\x1b[2J"))
    assert line.count("\n") == 1
    assert "\x1b" not in line
    configure(LogConfig("info", "text"))
    odd = ValueError("a\x1b[2J\u202e")
    logging.getLogger("ckptsync").error("failed", exc_info=odd)
    said = capsys.readouterr().err.split("\n")
    assert len(said) > 2
    assert all(line.isprintable() for line in said)


def test_a_line_is_said_when_it_changes_and_again_when_it_comes_back() -> None:
    waiting, sent = Line("a", "phase=waiting"), Line("a", "phase=sent")
    said: dict[str, str] = {}
    told = []
    for now in ([waiting], [waiting], [sent], [], [waiting], [waiting, Line("b", "x")]):
        lines, said = changed(said, now)
        told.append([line.text for line in lines])
    assert told == [["phase=waiting"], [], ["phase=sent"], [], ["phase=waiting"], ["x"]]


def test_pairs_are_quoted_where_they_must_be() -> None:
    text = pairs(phase="sent", run="a", detail="not yet", empty="", none=None, zero=0)
    assert text == 'phase=sent run=a detail="not yet" zero=0'
    assert pairs(x='say "a\\b"') == 'x="say \\"a\\\\b\\""'


@pytest.mark.parametrize("value", ["x", "a b", 'say "a\\b"', "a=b", "new\nline", "\\", '"', "0"])
def test_pairs_are_read_back_as_they_were_given(value: str) -> None:
    given = {"phase": "sent", "detail": value, "last": value}
    assert fields(pairs(**given)) == given


@pytest.mark.parametrize("text", ["", "not a pair", "phase=sent and more", "a=1  b=2"])
def test_a_text_that_is_something_else_is_not_taken_for_pairs(text: str) -> None:
    assert fields(text) is None
