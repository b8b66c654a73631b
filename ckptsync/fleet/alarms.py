"""What an alarm is: something that somebody should look at, said once for each thing, with since when, and what to do.  Times: seconds on the store's clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ckptsync.units import clean

MOST = 1000
"""Characters of each text of an alarm."""

Severity = Literal["critical", "warning"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning")
Kind = Literal["damage", "stall", "lost-node", "full", "late", "clock"]
KINDS: tuple[Kind, ...] = ("damage", "stall", "lost-node", "full", "late", "clock")
CODES: dict[str, Kind] = {
    "damaged": "damage",
    "unreadable": "damage",
    "ambiguous": "damage",
    "stalled": "stall",
    "node-lost": "lost-node",
    "no-head": "lost-node",
    "store-away": "lost-node",
    "disk-full": "full",
    "spool-full": "full",
    "store-full": "full",
    "no-space": "full",
    "arriving": "late",
    "waiting": "late",
    "unconsolidated": "late",
    "unverified": "late",
    "unread": "late",
    "no-config": "late",
    "clock": "clock",
}
"""Every code, and which kind it is of: `alerts.on` names kinds."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """``code`` and ``subject`` (a location, a run, a node, a path) name it.  ``since``: ``None`` where nobody can tell.

    Its texts are of names and errors in the store, and go to terminals, chats, mails and logs: they are clean, and not long, from the start.
    """

    code: str
    subject: str
    severity: Severity
    since: float | None
    text: str
    todo: str

    def __post_init__(self) -> None:
        """Clean what is shown."""
        for name in ("subject", "text", "todo"):
            object.__setattr__(self, name, clean(getattr(self, name), MOST))

    @property
    def kind(self) -> Kind:
        """What `alerts.on` calls it."""
        return CODES[self.code]

    @property
    def key(self) -> str:
        """The same as long as the alarm holds."""
        return f"{self.code} {self.subject}"


@dataclass(frozen=True, slots=True)
class Patience:
    """How long is too long, in seconds.

    ``node``: its silence; ``period``: within which every byte is read again; ``slow``: for a save that arrives, waits to be sent or to be
    consolidated; ``steps``: times the usual that a run may be without a checkpoint, and never less than ``least``;
    ``over``: after which what no longer changes is history and nobody is told of it; ``ended``, or ten times the usual: after which a training of which
    no hook tells has ended.
    """

    node: float = 600.0
    period: float = 7 * 86400.0
    slow: float = 3600.0
    steps: float = 3.0
    least: float = 900.0
    over: float = 7 * 86400.0
    ended: float = 86400.0


@dataclass(frozen=True, slots=True)
class Room:
    """Of the store, in bytes, where that can be asked."""

    free: int
    total: int
