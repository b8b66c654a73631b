"""Run an event's command within its limits, or POST to its URL.

A program of a user may hang, write without end, or leave processes running, and the head must go
on. A command is run without a shell, in `/`, by `ckptsync.child`: it dies with this process, and
what it leaves running in its session is killed when it ends. The JSON of the location is its
standard input. Its output is read to the end and dropped, but for the last line of each stream.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from http.client import HTTPException
from typing import IO

from ckptsync.child import ENVIRONMENT, Child, describe_end
from ckptsync.events.definitions import Definition
from ckptsync.quantities import show_duration
from ckptsync.records.event_record import LONGEST_NAME, MOST_METRICS
from ckptsync.threads import start_thread

LONGEST_LINE = 64 << 10  # bytes of a line of output that are read
LISTEN = 0.25  # seconds between two checks whether it must end
_AFTER = 1.0  # seconds after its end for output that is still on its way
_SYSTEMD = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID")
_METRIC = re.compile(r"[\w./@-]+")
_POST_WITHIN = 300.0  # seconds without an answer

Beat = Callable[[], object]
"""Called while it runs, some times a second; may raise, which ends it."""


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """How a program ended: why it failed (empty if it did not), what it measured.

    ``note``: why its metrics were refused.
    """

    error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def run_command(
    definition: Definition,
    words: Sequence[str],
    document: bytes,
    secrets: Mapping[str, str],
    beat: Beat,
) -> ProgramEnd:
    """Run the command of a definition with its filled ``words`` to its end; return how it ended.

    It is killed after ``definition.timeout`` seconds; that, and an exit code other than 0, is an
    error in the result, with its last line of stderr. Else the result has the metrics in its last
    line.

    Args:
        definition: says the timeout and the environment.
        words: the program and its arguments.
        document: its standard input.
        secrets: variables of this configuration. Only a definition with ``secrets`` gets them, and
            this process's variables; others get those of `ENVIRONMENT` and their own.
        beat: is called while it runs.

    Raises OSError if the command cannot be started, CkptsyncError without a thread, and what
    ``beat`` raises; then the command is killed.

    """
    configured = {
        name: os.environ.get(name) if value is None else value
        for name, value in definition.environment.items()
    }
    inherited = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    if definition.secrets:
        inherited = {k: v for k, v in os.environ.items() if k not in _SYSTEMD} | dict(secrets)
    environment = inherited | {
        name: value for name, value in configured.items() if value is not None
    }
    with tempfile.TemporaryFile() as data:
        data.write(document)
        data.seek(0)
        reading, writing = os.pipe()
        errors = bytearray()
        with os.fdopen(writing, "wb") as log:
            read_errors = partial(_keep_tail, os.fdopen(reading, "rb", 0), errors)
            reader = start_thread(read_errors, "event-stderr")
            child = Child(words, environment, log, data)
        last_line, reason, code = _listen(child, definition.timeout, beat)
        reader.join(_AFTER)  # a program that has left its session may hold the stream for ever
    if reason or code:
        last_error = (bytes(errors).decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return ProgramEnd(": ".join(filter(None, (reason or describe_end(code), last_error[:300]))))
    metrics, note = read_metrics(last_line)
    return ProgramEnd("", metrics, note)


def _keep_tail(stream: IO[bytes], tail: bytearray) -> None:
    """Read a stream to its end; ``tail`` holds its last `LONGEST_LINE` bytes."""
    with stream:
        while part := stream.read(1 << 16):
            tail += part
            del tail[: max(0, len(tail) - LONGEST_LINE)]


def _listen(child: Child, timeout: float, beat: Beat) -> tuple[bytes, str, int | None]:
    """Read a child's output until it ends, or kill it after ``timeout`` seconds.

    Return its last line that is not empty, why it was killed (empty if it was not), and its exit
    status. What it has started may write for ten more seconds, and is killed. An error of ``beat``
    kills it.
    """
    last_line, reason, deadline = b"", "", time.monotonic() + timeout
    ended_at: float | None = None
    try:
        while not reason:
            beat()
            line = child.line(LISTEN, LONGEST_LINE)
            now = time.monotonic()
            if line:
                last_line = line if line.strip() else last_line
            elif line == b"" and not child.has_ended():  # it has closed its output, and runs on
                time.sleep(LISTEN)
            elif line == b"" or (ended_at is not None and now - ended_at > _AFTER):
                break
            if ended_at is None and child.has_ended():
                ended_at = now
            # what it has started may write without end
            if ended_at is not None and now - ended_at > 10 * _AFTER:
                break
            if ended_at is None and now > deadline:
                reason = f"took longer than {show_duration(round(timeout))} and was killed"
    finally:
        last_line = child.rest().strip() or last_line
        code = child.end()
    if code is None:
        reason = "cannot be killed: its file server does not answer"
    return last_line, reason, code


def read_metrics(line: bytes) -> tuple[dict[str, float], str]:
    """Return the metrics in a command's last line, and why they were refused.

    One that is wrong refuses all. Both are empty if the line is no JSON object.
    """
    try:
        value = json.loads(line) if line.lstrip()[:1] == b"{" else None
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        return {}, ""
    if len(value) > MOST_METRICS:
        return {}, f"metrics refused: {len(value)}, at most {MOST_METRICS} are kept"
    for name, number in value.items():
        if not _METRIC.fullmatch(name) or len(name) > LONGEST_NAME:
            return {}, f"metrics refused: {name!r:.120} is not a metric's name"
        if isinstance(number, bool) or not isinstance(number, int | float):
            return {}, f"metrics refused: {name} is no number"
        if abs(number) > 1e300 or not math.isfinite(number):  # an int can be greater
            return {}, f"metrics refused: {name} is {number!r:.30}"
    return {name: float(number) for name, number in value.items()}, ""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: a token in the address would go along."""

    def redirect_request(self, *_args: object, **_more: object) -> None:
        """Return nothing: the answer is an error."""


def post(definition: Definition, document: bytes, beat: Beat) -> ProgramEnd:
    """POST the JSON of a location; return how that ended: well with a status of 200 to 299.

    A thread sends. This waits ``definition.timeout`` seconds for it, calling ``beat`` every
    `LISTEN` seconds, then leaves it behind. A redirection is an error. Raises nothing of the
    request; no error names the URL, which may hold a token.
    """
    answer: list[str] = []

    def send() -> None:
        """Append the outcome of the request to ``answer``."""
        headers = {"Content-Type": "application/json", "User-Agent": "ckptsync"}
        request = urllib.request.Request(definition.url, document, headers)  # noqa: S310 - http or https
        try:
            opener = urllib.request.build_opener(_NoRedirect)
            with opener.open(request, timeout=min(definition.timeout, _POST_WITHIN)):
                answer.append("")
        except urllib.error.HTTPError as e:
            answer.append(f"HTTP status {e.code}")
            e.close()
        except (OSError, HTTPException, ValueError) as e:
            reason = getattr(e, "reason", e)
            answer.append(
                f"no answer: {getattr(reason, 'strerror', None) or type(reason).__name__}"
            )

    thread, deadline = start_thread(send, "event-post"), time.monotonic() + definition.timeout
    while thread.is_alive():
        beat()
        if time.monotonic() > deadline:
            return ProgramEnd(f"no answer within {show_duration(round(definition.timeout))}")
        thread.join(LISTEN)
    return ProgramEnd(answer[0] if answer else "no answer")
