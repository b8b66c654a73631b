"""What the service and the heartbeat ask of the roles together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptsync.config.values import Config
from ckptsync.daemon.phases import Line, changed
from ckptsync.daemon.tick import Tick
from ckptsync.stores.contract import Store


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one tick of a role has seen and done: ``lines`` to log where they are new, ``queue`` and ``errors`` for `ckptsync status`."""

    lines: tuple[Line, ...] = ()
    queue: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()


class Role:
    """A role and its tick: what it said last time is remembered, so that only changes are logged."""

    def __init__(self, name: str, every: float, look: Callable[[], Outcome], fatal: Callable[[BaseException], None]) -> None:
        self.tick = Tick(name, every, self._run, fatal)
        self.outcome = Outcome()
        self._look = look
        self._log = logging.getLogger(f"ckptsync.{name}")
        self._said: dict[str, str] = {}

    def errors(self) -> tuple[str, ...]:
        """What the last tick said, and what it failed with."""
        return (*([f"{self.tick.name}: {self.tick.error}"] if self.tick.error else []), *self.outcome.errors)

    def _run(self) -> None:
        self.outcome = self._look()
        lines, self._said = changed(self._said, self.outcome.lines)
        for line in lines:
            self._log.log(logging.ERROR if line.is_error else logging.INFO, "%s", line.text)


class Working:
    """All roles of this process."""

    def __init__(self, roles: Sequence[Role]) -> None:
        self._roles = tuple(roles)

    @property
    def ticks(self) -> tuple[Tick, ...]:
        """One a role."""
        return tuple(role.tick for role in self._roles)

    def queue(self) -> tuple[str, ...]:
        """What is on its way."""
        return tuple(dict.fromkeys(item for role in self._roles for item in role.outcome.queue))

    def errors(self) -> tuple[str, ...]:
        """What the last ticks said."""
        return tuple(dict.fromkeys(error for role in self._roles for error in role.errors()))

    def status(self) -> str:
        """The present tense, on one line."""
        states = [f"{tick.name} {'at work' if tick.is_running else 'waits'}" for tick in self.ticks]
        return "; ".join([*states, f"{len(self.queue())} on the way", f"{len(self.errors())} errors"])


Roles = Callable[[Config, str, Store, Callable[[BaseException], None]], contextlib.AbstractContextManager[Working]]
"""From a configuration, a node id, a store and whom to tell of a fault, to the roles at work."""
