"""Send alarms to people: by POST to a webhook, or by a command.

A `Sender` for each channel decides what is due, and delivers it in a thread of its own, so the
monitor never waits for a webhook.  What was delivered is kept in a small file, so that a restart
neither repeats it nor forgets to say that an alarm is over.  If the file is lost, active alarms are
sent again.  Two heads both send: a message's ``key`` says that it is the same alarm.

A channel's target may be a secret (tokens in URLs), so no error names more than a host.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from ckptsync import __version__
from ckptsync.catalogue.cached import cache_path
from ckptsync.config.schema import Config
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError
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
)
from ckptsync.threads import start_thread
from ckptsync.typed_json import Decoder

FIRST, LONGEST = 30.0, 600.0  # seconds until a failed delivery is tried again, see `backoff`
ANSWERS_WITHIN = 15.0  # seconds, of a webhook, and for each step on the way to it
RUNS_WITHIN = 60.0  # seconds, of a command
# What a command inherits: no store's keys are among them.
_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "TMPDIR", "HTTP_PROXY",
    "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE",
    "SSL_CERT_DIR")  # fmt: skip

_DECODER: Decoder[dict[str, SentAlarm]] = Decoder(dict[str, SentAlarm], "sent alarms")


def open_channels(config: Config, node: str, fatal: Fatal) -> tuple[Sender, ...]:
    """Return the channels of a configuration."""
    alerts, receivers = config.alerts, list[Webhook | Command]()
    if alerts.webhook:
        receivers.append(Webhook(alerts.webhook))
    if alerts.command:
        receivers.append(Command(alerts.command))
    terms, source = Terms(alerts.on, alerts.repeat), (config.store.url, node)
    return tuple(Sender(receiver, terms, source, fatal) for receiver in receivers)


class Sender:
    """One channel: what was delivered, and the delivery that is under way, if one is.

    ``source``: the URL of the store, and the node that looked at it.
    """

    def __init__(
        self, receiver: Webhook | Command, terms: Terms, source: tuple[str, str], fatal: Fatal
    ) -> None:
        self.error = ""
        self.channel = Channel(receiver.name, 0, 0)
        self._receiver, self._terms, self._source, self._fatal = receiver, terms, source, fatal
        self._file = _file(source[0], receiver.target)
        self._memory: Memory = _read(self._file)
        self._lock = threading.Lock()
        self._is_out = False
        self._not_before, self._failures = 0.0, 0

    def active(self) -> list[Alarm]:
        """Return the alarms that were sent and are not over."""
        return [standing.alarm for standing in self._memory.values()]

    def offer(self, alarms: Iterable[Alarm], now: float) -> None:
        """Send what is due, unless a delivery is under way.

        Never waits.  ``now``: since the epoch.
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
        error = ""
        try:
            message = document(decision.messages, *self._source, now)
            self._receiver.deliver(json.dumps(message).encode())
        except CkptsyncError as e:
            error = f"alerts: {e}"
        except BaseException as e:  # noqa: BLE001 - a bug of ours: the process ends by it
            self._fatal(e)
            return
        delivered, failed = self.channel.delivered + (not error), self.channel.failed + bool(error)
        with self._lock:
            self._memory = decision.if_not_sent if error else decision.if_sent
            self._is_out, self.error = False, error
            self.channel = replace(self.channel, delivered=delivered, failed=failed)
            self._failures = self._failures + 1 if error else 0
            self._not_before = now + backoff(self._failures, FIRST, LONGEST) if error else 0.0
        if not error:
            _write(self._file, decision.if_sent)


def _file(url: str, target: str) -> Path | None:
    """Return where to keep what a channel was sent; ``None`` for a user without a home."""
    name = f"alerts-{digest(f'{url} {target}'.encode())[:16]}.json"
    try:
        return cache_path(url).with_name(name)
    except RuntimeError:
        return None


def _read(path: Path | None) -> Memory:
    try:
        found = _DECODER.decode(path.read_bytes(), str(path)) if path else {}
    except (OSError, Corrupt):
        return {}
    return {key: standing for key, standing in found.items() if standing.alarm.code in CODES}


def _write(path: Path | None, memory: Memory) -> None:
    if path is None:
        return
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a full cache costs a message twice
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            file.write(msgspec.json.encode(memory))
        draft.replace(path)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would become a GET, and the token would go along."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook:
    """POSTs JSON to a URL; anything but a 2xx is a failure, a redirection too.

    ``target``: a digest of where it goes, no secret.  Raises ConfigError.
    """

    name = "webhook"

    def __init__(self, url: str) -> None:
        hint = "see alerts.webhook in the configuration"
        try:
            parts = urllib.parse.urlsplit(url)
        except ValueError:
            raise ConfigError("alerts.webhook: not a URL", hint=hint) from None
        if parts.scheme not in ("http", "https"):
            raise ConfigError("alerts.webhook: neither http nor https", hint=hint)
        self.target = digest(url.encode())
        self._url, self._where = url, f"webhook {parts.scheme}://{parts.hostname or ''}"
        self._opener = urllib.request.build_opener(_NoRedirect)

    def deliver(self, message: bytes) -> None:
        """Send a document, within some `ANSWERS_WITHIN`; raises StoreError."""
        headers = {"Content-Type": "application/json", "User-Agent": f"ckptsync/{__version__}"}
        try:
            request = urllib.request.Request(self._url, message, headers, method="POST")  # noqa: S310 - the configuration takes http and https alone
            self._opener.open(request, timeout=ANSWERS_WITHIN).close()
        except urllib.error.HTTPError as e:
            with e:
                hint = "see alerts.webhook, and what that service logs"
                raise StoreError(f"{self._where}: HTTP status {e.code}", hint=hint) from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            # of which no more is shown than repeats nothing of the URL
            reason = getattr(e, "reason", e)
            text = (reason.strerror if isinstance(reason, OSError) else None) or "request failed"
            if isinstance(reason, TimeoutError):
                text = f"no answer within {ANSWERS_WITHIN:g} s"
            hint = "see alerts.webhook, DNS, proxy and firewall"
            raise StoreError(f"{self._where}: {text}", hint=hint) from None


class Command:
    """Runs a program with JSON on its standard input, without a shell and with few variables.

    What it prints is not kept.  ``target``: as of `Webhook`.
    """

    name = "command"

    def __init__(self, words: Sequence[str]) -> None:
        self.target = digest(json.dumps(words).encode())
        self._words, self._where = words, f"alert command {words[0]}"

    def deliver(self, message: bytes) -> None:
        """Send a document, within `RUNS_WITHIN`; raises StoreError."""
        try:
            child = subprocess.Popen(  # noqa: S603 - the operator's own, from the configuration
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
                cwd="/",
                start_new_session=True,
            )
        except OSError as e:
            hint = "see alerts.command, and what the service may run"
            raise StoreError(f"{self._where}: {e.strerror}", hint=hint) from None
        with child:
            try:
                child.communicate(message + b"\n", RUNS_WITHIN)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)  # and all that it started
                why = f"{self._where}: took longer than {RUNS_WITHIN:g} s and was killed"
                raise StoreError(why) from None
        if child.returncode:
            hint = "run it by hand with an example message from `ckptsync help monitoring`"
            raise StoreError(f"{self._where}: exit status {child.returncode}", hint=hint)
