"""The head's look at everything, and who is told of its alarms: by POST, or by a command.

`Monitor` looks; a `Sender` for each channel decides what is due, and sends it in a thread of its own: a look offers what holds now, and goes on, however
long a webhook takes.  What was told is kept in a small file, so that a restart neither repeats it nor forgets to say that it is over.  Without that file
what holds is told once more, which is all the harm.  Two heads both tell: a message's ``key`` says that it is the same alarm.

What a channel is given may be seen by anybody who gets alerts; where it goes may be a secret (tokens in URLs), so no error names more than a host.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from ckptsync import __version__
from ckptsync.config.schema import Config
from ckptsync.decoding import Decoder
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, StoreError
from ckptsync.fleet.alarms import CODES, Alarm
from ckptsync.fleet.alerting import Decision, Memory, Standing, Terms, decide, document
from ckptsync.fleet.overview import Overview
from ckptsync.service.log import Line, pairs
from ckptsync.service.overview import Overseer
from ckptsync.service.periodic import Outcome, backoff
from ckptsync.units import show_duration
from ckptsync.web.measured import Told

AWAY = 300.0
"""s for which a store may be away before anybody is told."""
FIRST, LONGEST = 30.0, 600.0
"""s until what could not be delivered is tried again, see `backoff`."""
PATIENCE = 15.0
"""s for a webhook's answer, and for each step on the way to it."""
RUNS = 60.0
"""s that a command may take."""
KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "USER", "LOGNAME", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR")  # fmt: skip
"""Variables that a command inherits: no store's keys are among them."""

_DECODER: Decoder[dict[str, Standing]] = Decoder(dict[str, Standing], "what was told of alarms")


class Monitor:
    """Looks at all of the store: what it has ``seen`` last is what /metrics tells, and what alerts are made of."""

    def __init__(self, overseer: Overseer, senders: Sequence[Sender] = ()) -> None:
        self.seen: Overview | None = None
        self.senders = tuple(senders)
        self._overseer = overseer
        self._well = time.monotonic()

    def look(self) -> Outcome:
        """Look once.  Raises StoreError, and tells of a store that stays away."""
        try:
            seen = self._overseer.look()
        except StoreError as e:
            self._tell_away(str(e), time.monotonic() - self._well)
            raise
        self._well = time.monotonic()
        for sender in self.senders:
            sender.offer(seen.alarms, time.time())
        lines = tuple(_lines(self.seen, seen))
        self.seen = seen
        return Outcome(lines, errors=tuple(s.error for s in self.senders if s.error))

    def _tell_away(self, why: str, away: float) -> None:
        if away < AWAY:
            return
        now = time.time()
        text = f"the store could not be read for {show_duration(round(away))}: {why}"
        todo = "see whether it can be reached from the head; workers keep what they have pinned"
        for sender in self.senders:
            sender.more(Alarm("store-away", "store", "critical", now - away, text, todo), now)


def monitor(config: Config, node: str, overseer: Overseer, fatal: Callable[[BaseException], None]) -> Monitor:
    """The monitor and the channels that a configuration names; raises ConfigError."""
    terms, kept = Terms(config.alerts.on, config.alerts.repeat), kept_in(os.environ)
    channels: list[Webhook | Command] = []
    if config.alerts.webhook:
        channels.append(Webhook(config.alerts.webhook))
    if config.alerts.command:
        channels.append(Command(config.alerts.command))
    return Monitor(overseer, [Sender(c, terms, (config.store.url, node), kept, fatal) for c in channels])


def _lines(before: Overview | None, now: Overview) -> Iterator[Line]:
    """Each alarm once as long as it holds, and once when it is over; nothing in it counts time."""
    holding = {a.key for a in now.alarms}
    for a in now.alarms:
        text = pairs(phase="alarm", code=a.code, subject=a.subject, severity=a.severity, todo=a.todo)
        yield Line(f"alarm {a.key}", text, is_error=a.severity == "critical")
    for a in before.alarms if before else ():
        if a.key not in holding:
            yield Line(f"over {a.key}", pairs(phase="alarm-over", code=a.code, subject=a.subject))


class Sender:
    """One channel: what it was told, and the delivery that is under way, if one is.  ``source``: who tells: the store, and the node that looked at it."""

    def __init__(
        self,
        channel: Webhook | Command,
        terms: Terms,
        source: tuple[str, str],
        kept: Path | None,
        fatal: Callable[[BaseException], None],
    ) -> None:
        self.error = ""
        self.told = Told(channel.name, 0, 0)
        self._channel, self._terms, self._source, self._fatal = channel, terms, source, fatal
        self._kept = kept and kept / f"alerts-{digest(f'{source[0]} {channel.target}'.encode())[:16]}.json"
        self._memory: Memory = _read(self._kept)
        self._lock = threading.Lock()
        self._is_out = False
        self._not_before, self._failures = 0.0, 0

    def offer(self, alarms: Iterable[Alarm], now: float) -> None:
        """Send what is due, if anything is and the last delivery is over.  Never waits.  ``now``: seconds since the epoch."""
        with self._lock:
            if self._is_out:
                return
            decision = decide(alarms, self._memory, self._terms, now)
            if not decision.messages or self._not_before - LONGEST < now < self._not_before:
                self._memory = decision.untold
                return
            self._is_out = True
        threading.Thread(target=self._deliver, args=(decision, now), name=f"alert-{self.told.channel}", daemon=True).start()

    def more(self, alarm: Alarm, now: float) -> None:
        """Of a store that cannot be read: what was told holds still, as far as anybody knows, and this does too."""
        self.offer([*(standing.alarm for standing in self._memory.values()), alarm], now)

    def _deliver(self, decision: Decision, now: float) -> None:
        try:
            self._channel.deliver(document(decision.messages, *self._source, now))
        except CkptsyncError as e:
            self._ended(decision.untold, now, str(e))
        except BaseException as e:  # noqa: BLE001 - a bug of ours: the process ends by it
            self._fatal(e)
        else:
            self._ended(decision.told, now)

    def _ended(self, memory: Memory, now: float, error: str = "") -> None:
        with self._lock:
            self._memory, self._is_out, self.error = memory, False, f"alerts: {error}" if error else ""
            self.told = replace(self.told, delivered=self.told.delivered + (not error), failed=self.told.failed + bool(error))
            self._failures = self._failures + 1 if error else 0
            self._not_before = now + backoff(self._failures, FIRST, LONGEST) if error else 0.0
        if not error:
            _write(self._kept, memory)


def kept_in(environment: Mapping[str, str]) -> Path | None:
    """The directory for what may be lost: the service's own, or the user's; ``None`` where there is neither."""
    given = environment.get("CACHE_DIRECTORY", "").partition(":")[0]
    home = environment.get("XDG_CACHE_HOME") or (f"{environment['HOME']}/.cache" if environment.get("HOME") else "")
    return Path(given) if given else Path(home) / "ckptsync" if home else None


def _read(path: Path | None) -> Memory:
    if path is None:
        return {}
    try:
        found = _DECODER.decode(path.read_bytes(), str(path))
    except (OSError, Corrupt):
        return {}  # nothing was told, or nobody knows: see the module
    return {key: standing for key, standing in found.items() if standing.alarm.code in CODES}


def _write(path: Path | None, memory: Mapping[str, Standing]) -> None:
    if path is None:
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):  # a full cache costs a message twice
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "wb") as file:
            file.write(msgspec.json.encode({key: asdict(standing) for key, standing in memory.items()}))
        fresh.replace(path)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A POST that is sent elsewhere would become a GET, and the token would go along."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


class Webhook:
    """POSTs JSON; raises ConfigError for what is no URL.  Anything but a 2xx is a failure, redirections too.

    ``name``: as status and metrics call it; no secret.  ``target``: a digest of where it goes.
    """

    name = "webhook"

    def __init__(self, url: str) -> None:
        self._url, self.target = url, digest(url.encode())
        try:
            parts = urllib.parse.urlsplit(url)
        except ValueError:
            raise ConfigError("alerts.webhook: not a URL") from None
        self._where = f"webhook {parts.scheme}://{parts.hostname or ''}"
        self._opener = urllib.request.OpenerDirector()  # no file:, no ftp:
        for handler in (
            urllib.request.ProxyHandler(),
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPDefaultErrorHandler(),
            urllib.request.HTTPErrorProcessor(),
            _NoRedirect(),
            urllib.request.UnknownHandler(),
        ):
            self._opener.add_handler(handler)

    def deliver(self, document: Mapping[str, Any]) -> None:
        """Send it, until somebody has taken it; raises StoreError.  Never longer than about a minute."""
        headers = {"Content-Type": "application/json", "User-Agent": f"ckptsync/{__version__}"}
        try:
            request = urllib.request.Request(self._url, json.dumps(document).encode(), headers, method="POST")  # noqa: S310 - the opener knows no other schemes
            self._opener.open(request, timeout=PATIENCE).close()
        except urllib.error.HTTPError as e:
            with e:
                raise StoreError(
                    f"{self._where}: answered {e.code}", hint="see alerts.webhook, and what that service logs"
                ) from None
        except (OSError, http.client.HTTPException, ValueError) as e:
            reason = getattr(e, "reason", e)
            raise StoreError(f"{self._where}: {_plain(reason)}", hint="see alerts.webhook, DNS, proxy and firewall") from None


def _plain(reason: object) -> str:
    """What an error says without what it may repeat of the URL."""
    if isinstance(reason, TimeoutError):
        return f"no answer within {PATIENCE:g} s"
    return (reason.strerror if isinstance(reason, OSError) else None) or "cannot be asked"


class Command:
    """Runs an argument list, with the alert as JSON on its standard input, no shell, and few variables; what it prints is not kept."""

    name = "command"

    def __init__(self, words: tuple[str, ...]) -> None:
        self._words, self.target = words, digest(json.dumps(words).encode())
        self._where = f"alert command {words[0]}"

    def deliver(self, document: Mapping[str, Any]) -> None:
        """As a webhook's.  All that it started is killed with it when it takes too long."""
        environment = {name: os.environ[name] for name in KEPT if name in os.environ}
        try:
            child = subprocess.Popen(  # noqa: S603 - the operator's own, from the configuration
                self._words,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as e:
            raise StoreError(f"{self._where}: {e.strerror}", hint="see alerts.command, and what the service may run") from None
        with child:
            try:
                child.communicate(json.dumps(document).encode() + b"\n", RUNS)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                raise StoreError(f"{self._where}: took longer than {RUNS:g} s and was killed") from None
        if child.returncode:
            raise StoreError(
                f"{self._where}: exit status {child.returncode}",
                hint="run it by hand with a document as `ckptsync help monitoring` shows it",
            )
