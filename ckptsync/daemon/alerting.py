"""Alerts leave in threads of their own: a tick offers what holds now, and goes on, however long a webhook takes.

What was told is kept in a small file, so that a restart neither repeats it nor forgets to say that it is over.  Without that file what holds is told
once more, which is all the harm.  Two heads both tell: a message's ``key`` says that it is the same alarm.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from ckptsync.daemon.channels import Channel
from ckptsync.daemon.working import Posted
from ckptsync.decoding import Decoder
from ckptsync.digest import digest
from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.fleet.alarms import CODES, Alarm
from ckptsync.fleet.alerting import Decision, Memory, Standing, Terms, decide, document

FIRST, LONGEST = 30.0, 600.0
"""s until what could not be delivered is tried again: doubled each time."""

_DECODER: Decoder[dict[str, Standing]] = Decoder(dict[str, Standing], "what was told of alarms")


@dataclass(frozen=True, slots=True)
class From:
    """Who tells: the store, and the node that looked at it."""

    store: str
    head: str


class Postman:
    """One channel: what it was told, and the delivery that is under way, if one is."""

    def __init__(
        self, channel: Channel, terms: Terms, source: From, kept: Path | None, fatal: Callable[[BaseException], None]
    ) -> None:
        self.error = ""
        self.posted = Posted(channel.name)
        self._channel, self._terms, self._source, self._fatal = channel, terms, source, fatal
        self._kept = kept and kept / f"alerts-{digest(f'{source.store} {channel.target}'.encode())[:16]}.json"
        self._memory: Memory = _read(self._kept)
        self._lock = threading.Lock()
        self._is_out = False
        self._not_before, self._pause = 0.0, FIRST

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
        threading.Thread(target=self._deliver, args=(decision, now), name=f"alert-{self.posted.channel}", daemon=True).start()

    def more(self, alarm: Alarm, now: float) -> None:
        """Of a store that cannot be read: what was told holds still, as far as anybody knows, and this does too."""
        self.offer([*(standing.alarm for standing in self._memory.values()), alarm], now)

    def _deliver(self, decision: Decision, now: float) -> None:
        try:
            self._channel.deliver(document(decision.messages, self._source.store, self._source.head, now))
        except CkptsyncError as e:
            self._ended(decision.untold, now, str(e))
        except BaseException as e:  # noqa: BLE001 - a bug of ours: the process ends by it
            self._fatal(e)
        else:
            self._ended(decision.told, now)

    def _ended(self, memory: Memory, now: float, error: str = "") -> None:
        with self._lock:
            self._memory, self._is_out, self.error = memory, False, f"alerts: {error}" if error else ""
            was = self.posted
            self.posted = Posted(was.channel, was.delivered + (not error), was.failed + bool(error))
            self._not_before = now + self._pause if error else 0.0
            self._pause = min(2 * self._pause, LONGEST) if error else FIRST
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
