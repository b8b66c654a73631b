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
from contextlib import contextmanager

import pytest

from ckptsync.config.schema import LogConfig
from ckptsync.service.log import Line, changed, configure, moment, pairs

NOON = moment(1.8e9)


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
        logging.getLogger("ckptsync.worker.tick").log(number, "%s", message)
    return stream.getvalue()


SENT = pairs(phase="sent", run="a", checkpoint="checkpoint-1", files=7, bytes=1000)


@contextmanager
def on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        yield
    os.close(ours)


def test_off_a_terminal_a_line_is_json_or_logfmt_and_has_each_fact_once() -> None:
    event = json.loads(logged("auto", "info", (logging.INFO, SENT)))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", event.pop("time"))
    of = {"run": "a", "checkpoint": "checkpoint-1", "files": 7, "bytes": 1000}
    logger = "ckptsync.worker.tick"
    assert event == {
        "level": "info", "logger": logger, "message": "stored", "phase": "sent", **of
    }  # fmt: skip
    line = logged("text", "info", (logging.INFO, SENT), (logging.DEBUG, "unseen"))
    values = "phase=sent run=a checkpoint=checkpoint-1 files=7 bytes=1000"
    assert re.fullmatch(rf"time=\S+Z level=info logger={re.escape(logger)} {values}\n", line)
    other = logged("text", "info", (logging.WARNING, "no pairs"))
    assert other.endswith(f' level=warning logger={logger} message="no pairs"\n')


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SENT, "a/checkpoint-1: stored (7 files, 1 KB)"),
        ("some words", "some words"),
        (
            pairs(phase="waiting", run="a", checkpoint="c", reason="no state yet", until=NOON),
            f"a/c: waits until {NOON.astimezone():%H:%M:%S}: no state yet",
        ),
        (
            pairs(phase="failed", task="store", failures=1, error="away", hint="look"),
            "store: failed: away; look (failures 1)",
        ),
        (
            pairs(phase="verify", run="a", checkpoint="c", done=5, total=10, rate=1, left=90),
            "a/c: verifying (5 B done, 10 B total, 1 B/s, 1m30s left)",
        ),
        (pairs(phase="started", node="n", store="/s"), "runs (node n, store /s)"),
        (pairs(phase="unreadable", record="x.json", error="odd"), "x.json: cannot be read: odd"),
        (pairs(phase="given-up", subject="a/c: eval", tries=5), "a/c: eval: given up (tries 5)"),
    ],
)
def test_on_a_terminal_a_line_is_a_sentence_for_people(
    monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    with on_a_terminal(monkeypatch):
        for form in ("auto", "text"):
            line = logged(form, "info", (logging.INFO, text))
            assert re.fullmatch(rf"[0-9-]{{10}} [0-9:]{{8}} info    {re.escape(said)}\n", line)
        assert json.loads(logged("json", "info", (logging.INFO, text)))["level"] == "info"


@pytest.mark.parametrize(
    ("environment", "is_coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_a_terminal_has_colours_unless_its_user_wants_none(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], *, is_coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with on_a_terminal(monkeypatch):
        assert ("\x1b[31merror" in logged("auto", "info", (logging.ERROR, "x"))) == is_coloured


def test_json_is_an_object_a_line_and_no_pair_forges_what_is_ours() -> None:
    lines = logged("json", "debug", (logging.WARNING, "a\nb"), (logging.DEBUG, "c")).splitlines()
    assert [json.loads(line)["message"] for line in lines] == ["a\nb", "c"]
    text = pairs(phase="sent", detail="not yet", level="debug", message="forged")
    event = json.loads(logged("json", "info", (logging.INFO, text)))
    assert (event["level"], event["message"], event["detail"]) == ("info", "stored", "not yet")
    assert " level=info " in logged("text", "info", (logging.INFO, text))


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
    waiting, sent = Line("a", "phase=waiting", state="w"), Line("a", "phase=sent")
    later = Line("a", "phase=waiting until=9", state="w")
    said: dict[str, str] = {}
    told = []
    for now in ([waiting], [later], [sent], [], [sent], [sent, Line("b", "x")]):
        lines, said = changed(said, now)
        told.append([line.text for line in lines])
    assert told == [["phase=waiting"], [], ["phase=sent"], [], ["phase=sent"], ["x"]]


def test_pairs_are_quoted_where_they_must_be() -> None:
    text = pairs(phase="sent", run="a", detail="not yet", empty="", none=None, zero=0)
    assert text == 'phase=sent run=a detail="not yet" zero=0'
    assert pairs(x='say "a\\b"') == 'x="say \\"a\\\\b\\""'
