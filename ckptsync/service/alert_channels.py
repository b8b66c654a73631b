"""Send alarms to people: by Apprise, or by a command.

Each channel has a `Sender`, which decides what is sent now and delivers it in a thread of its own,
so the monitor never waits for a service.  One message holds all alarms that are sent at a time, and
messages are `PAUSE` apart.  Delivered alarms are recorded in a small file, so that a restart does
not repeat them, and still says that one is over; without the file, active alarms are sent again.
Two heads both send: an alarm's ``key`` is the same in both.

An Apprise URL is a secret (it holds tokens), so no error names more than its scheme.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ckptsync.catalogue.cached import cache_path
from ckptsync.child import ENVIRONMENT, PACKAGES, PARENT, describe_end
from ckptsync.config.schema import Config
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError
from ckptsync.install_commands import install_extra
from ckptsync.quantities import backoff
from ckptsync.service.tasks import Fatal
from ckptsync.status.alarms import (
    CODES,
    Alarm,
    Channel,
    Decision,
    Memory,
    SentAlarm,
    Terms,
    decide,
    document,
    test_document,
)
from ckptsync.threads import start_thread
from ckptsync.typed_json import Decoder

FIRST, LONGEST = 30.0, 600.0  # seconds until a failed delivery is tried again, see `backoff`
PAUSE = 60.0  # seconds from a delivered message to the next one
RUNS_WITHIN = 60.0  # seconds, of a delivery
DELIVERY = (sys.executable, "-m", "ckptsync.service.apprise_delivery")

_DECODER: Decoder[dict[str, SentAlarm]] = Decoder(dict[str, SentAlarm], "sent alarms")


def open_channels(config: Config, node: str, fatal: Fatal) -> tuple[Sender, ...]:
    """Return a sender for each channel in `alerts`.

    Raises ConfigError if a URL is not accepted, StoreError if Apprise's process fails.
    """
    terms = Terms(config.alerts.on, config.alerts.repeat)
    source = (config.store.url, node)
    return tuple(Sender(receiver, terms, source, fatal) for receiver in _receivers(config))


def send_test(config: Config, node: str, now: float) -> Iterator[tuple[str, CkptsyncError | None]]:
    """Send a test message by each channel; yield its name, and the error if that failed.

    Each is sent when it is asked for, and waited for.  Nothing is recorded.  ``now``: since the
    epoch.  Raises as `open_channels`, at the first one.
    """
    message = test_document(config.store.url, node, now)
    for receiver in _receivers(config):
        error: CkptsyncError | None = None
        try:
            receiver.deliver(message)
        except CkptsyncError as e:
            error = e
        yield receiver.name, error


def _receivers(config: Config) -> list[Receiver]:
    """Return the URLs and the command in `alerts`.  Raises as `open_channels`."""
    urls, command = config.alerts.urls, config.alerts.command
    if urls:
        _check_urls(urls)
    channels = [AppriseUrl(url, number) for number, url in enumerate(urls, 1)]
    return [*channels, *([Command(command)] if command else [])]


class Receiver(Protocol):
    """Where a channel delivers to.

    ``name`` is shown; ``target`` is a digest of the URL or the command, which is no secret.
    """

    name: str
    target: str

    def deliver(self, message: Mapping[str, Any]) -> None:
        """Send a document, within `RUNS_WITHIN` seconds.

        Raises StoreError if that fails; its text does not repeat ``name``.
        """


class Sender:
    """One channel: the alarms that it delivered, and its present delivery, if there is one.

    Args:
        receiver: where it delivers to.
        terms: which alarms are sent, and how often.
        source: the URL of the store, and the node that read it.
        fatal: is called with a bug.

    """

    def __init__(
        self, receiver: Receiver, terms: Terms, source: tuple[str, str], fatal: Fatal
    ) -> None:
        """Read which alarms were sent, from a file of this machine.  Begin no delivery."""
        self.error = ""
        self.channel = Channel(receiver.name, 0, 0)
        self._receiver, self._terms, self._source, self._fatal = receiver, terms, source, fatal
        self._file = _file(source[0], receiver.target)
        self._memory: Memory = _read(self._file)
        self._lock = threading.Lock()
        self._is_out = False
        self._not_before, self._failures = 0.0, 0

    def active(self) -> list[Alarm]:
        """Return the alarms that were sent and have not been reported as over."""
        return [standing.alarm for standing in self._memory.values()]

    def offer(self, alarms: Iterable[Alarm], now: float) -> None:
        """Begin to deliver a message, if these alarms need one now.  Never waits.

        Begins none while one is being delivered, nor in the pause after it; the next overview
        offers them again.  If no thread can be started, that is the ``error``.  ``now``: since the
        epoch.
        """
        with self._lock:
            if self._is_out:
                return
            decision = decide(alarms, self._memory, self._terms, now)
            # a clock that was set back by an hour must not keep anything back for an hour
            if not decision.messages or self._not_before - LONGEST < now < self._not_before:
                self._memory = decision.if_not_sent
                return
            self._is_out = True
        try:
            start_thread(partial(self._deliver, decision, now), f"alert-{self._receiver.name}")
        except CkptsyncError as e:  # the next overview offers it again
            with self._lock:
                self._is_out, self.error = False, str(e)

    def _deliver(self, decision: Decision, now: float) -> None:
        """Deliver a message, then record what was sent, or the error, and when the next may go.

        Only what was sent goes into the file.  A bug goes to ``fatal``, and ends all sending.
        """
        error = ""
        try:
            message = document(decision.messages, *self._source, now)
            self._receiver.deliver(message)
        except CkptsyncError as e:
            error = f"alerts: {self._receiver.name}: {e}"
        except BaseException as e:  # noqa: BLE001 - a bug of ours: the process ends by it
            self._fatal(e)
            return
        delivered, failed = self.channel.delivered + (not error), self.channel.failed + bool(error)
        with self._lock:
            self._memory = decision.if_not_sent if error else decision.if_sent
            self._is_out, self.error = False, error
            self.channel = replace(self.channel, delivered=delivered, failed=failed)
            self._failures = self._failures + 1 if error else 0
            pause = backoff(self._failures, FIRST, LONGEST) if error else PAUSE
            self._not_before = now + pause
        if not error:
            _write(self._file, decision.if_sent)


def _file(url: str, target: str) -> Path | None:
    """Return the path of the file of a channel's sent alarms; None for a user without a home."""
    name = f"alerts-{digest(f'{url} {target}'.encode())[:16]}.json"
    try:
        return cache_path(url).with_name(name)
    except RuntimeError:
        return None


def _read(path: Path | None) -> Memory:
    """Return the sent alarms in a file, but unknown codes; none if it is missing or damaged."""
    try:
        sent_alarms = _DECODER.decode(path.read_bytes(), str(path)) if path else {}
    except (OSError, Corrupt):
        return {}
    return {key: standing for key, standing in sent_alarms.items() if standing.alarm.code in CODES}


def _write(path: Path | None, memory: Memory) -> None:
    """Replace the file of sent alarms; a failure is ignored."""
    if path is None:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a full cache costs a message twice
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(memory))
        draft.replace(path)


class AppriseUrl:
    """Sends to one URL of `alerts.urls`, in a child process (`apprise_delivery`).

    ``name``: the URL's scheme and its place in the list, which is all that anybody is shown.
    """

    def __init__(self, url: str, number: int) -> None:
        """Name the URL by its scheme and ``number``, since it may hold a secret."""
        self.name = f"{url.partition('://')[0].lower()}-{number}"
        self.target = digest(url.encode())
        self._url = url

    def deliver(self, message: Mapping[str, Any]) -> None:
        """Send a document's title and text; raise StoreError if Apprise cannot deliver them.

        The text's first line, which repeats the title, is left out.
        """
        body = {
            "title": message["title"],
            "body": message["text"].partition("\n")[2],
            "type": _TYPES[message["severity"]],
        }
        [reason] = _ask_apprise([self._url], body)
        if reason:
            hint = f"`apprise -vvv -b test URL` shows why; see {self.name} in alerts.urls"
            raise StoreError(reason, hint=hint)


_TYPES = {"critical": "failure", "warning": "warning", "resolved": "success", "test": "info"}
"""What Apprise calls the severity of a message, by which services choose a colour or an icon."""


def _check_urls(urls: Sequence[str]) -> None:
    """Raise ConfigError if Apprise is not installed, or does not accept one of these URLs.

    Raises StoreError if Apprise's process fails.
    """
    if find_spec("apprise") is None:
        hint = install_extra("alerts")
        raise ConfigError("alerts.urls: apprise is not installed", hint=hint)
    refusals = zip(range(1, len(urls) + 1), _ask_apprise(urls, None), strict=True)
    if lines := [f"number {number}: {reason}" for number, reason in refusals if reason]:
        hint = "`apprise --details` lists the services and the forms of their URLs"
        raise ConfigError(f"alerts.urls: {'; '.join(lines)}", hint=hint)


def _ask_apprise(urls: Sequence[str], message: Mapping[str, str] | None) -> list[str]:
    """Have a child send a message to each URL, and return what failed for each, or "".

    None only checks the URLs. Raises StoreError if the child fails, or is killed as `_run` says.
    """
    request = json.dumps({"urls": list(urls), "message": message}).encode()
    environment = {PARENT: str(os.getpid()), "PYTHONPATH": PACKAGES}
    status, answer = _run(DELIVERY, request, environment, keeps_output=True)
    try:
        reasons: list[str] = json.loads(answer)
    except ValueError:
        raise StoreError(f"apprise: its process {describe_end(status)}") from None
    return reasons


class Command:
    """Runs a program with JSON on its standard input, without a shell and with few variables.

    Its output is discarded.
    """

    name = "command"

    def __init__(self, words: Sequence[str]) -> None:
        self.target = digest(json.dumps(words).encode())
        self._words = words

    def deliver(self, message: Mapping[str, Any]) -> None:
        """Run the program with a document; raise StoreError if it fails or takes too long."""
        status, _ = _run(self._words, json.dumps(message).encode() + b"\n", {})
        if status:
            hint = "run it by hand with an example message from `ckptsync help monitoring`"
            raise StoreError(f"{self._words[0]}: exit status {status}", hint=hint)


def _run(
    words: Sequence[str],
    request: bytes,
    environment: Mapping[str, str],
    *,
    keeps_output: bool = False,
) -> tuple[int, bytes]:
    """Run a program to its end; return its exit status, and its output or, unless kept, b"".

    ``request`` is its standard input, ``environment`` is added to a few variables.  Raises
    StoreError if it cannot be started, or is killed, with its children, after `RUNS_WITHIN`.
    """
    few = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    try:
        child = subprocess.Popen(  # noqa: S603 - our own module, or what the operator configured
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if keeps_output else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**few, **environment},
            cwd="/",
            start_new_session=True,
        )
    except OSError as e:
        hint = "see alerts.command, and what the service may run"
        raise StoreError(f"{words[0]}: {e.strerror}", hint=hint) from None
    with child:
        try:
            output, _ = child.communicate(request, RUNS_WITHIN)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # and all that it started
            why = f"{words[0]}: took longer than {RUNS_WITHIN:g} s and was killed"
            raise StoreError(why) from None
    return child.returncode, output or b""
