"""Whom to tell of which alarm, and when: once when it is raised, again after a while, and when it is over.  Pure; times are seconds of one clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ckptsync.fleet.alarms import SEVERITIES, Alarm

FORMAT = 1
HOLD = 90.0
"""s for which an alarm must be gone before it is said to be over: what comes and goes is one alarm."""
MOST = 20  # lines of a message's text

Status = Literal["raised", "repeated", "resolved"]


@dataclass(frozen=True, slots=True)
class Standing:
    """An alarm that was told: ``first`` and ``last`` when; ``gone``: since when it does not hold any more, 0 while it does."""

    alarm: Alarm
    first: float
    last: float
    gone: float = 0.0


Memory = Mapping[str, Standing]
"""What was told, by the alarms' keys.  Losing it tells what holds once more, and what ended meanwhile not at all."""


@dataclass(frozen=True, slots=True)
class Message:
    """``first``: when it was told first."""

    status: Status
    alarm: Alarm
    first: float


@dataclass(frozen=True, slots=True)
class Decision:
    """What to tell now, and what to remember: ``told`` if that succeeds, else ``untold``, so that it is tried again."""

    messages: tuple[Message, ...]
    told: Memory
    untold: Memory


@dataclass(frozen=True, slots=True)
class Terms:
    """``kinds`` of alarms that are told; ``repeat``: seconds."""

    kinds: tuple[str, ...]
    repeat: float


def decide(alarms: Iterable[Alarm], memory: Memory, terms: Terms, now: float) -> Decision:
    """The same for the same arguments."""
    holding = {a.key: a for a in alarms if a.kind in terms.kinds}
    untold = {key: _seen(standing, key in holding, now) for key, standing in memory.items()}
    messages = [m for key, alarm in holding.items() if (m := _message(alarm, memory.get(key), terms, now))]
    over = [s for key, s in untold.items() if s.gone and now - s.gone >= HOLD]
    messages += [Message("resolved", s.alarm, s.first) for s in over]
    told = {key: s for key, s in untold.items() if s not in over}
    told |= {m.alarm.key: Standing(m.alarm, m.first, now) for m in messages if m.status != "resolved"}
    return Decision(tuple(messages), told, untold)


def _seen(standing: Standing, holds: bool, now: float) -> Standing:  # noqa: FBT001 - a fact, not a way to behave
    return replace(standing, gone=0.0 if holds else standing.gone or now)


def _message(alarm: Alarm, before: Standing | None, terms: Terms, now: float) -> Message | None:
    if before is None:
        return Message("raised", alarm, now)
    if SEVERITIES.index(alarm.severity) < SEVERITIES.index(before.alarm.severity):
        return Message("raised", alarm, before.first)
    is_due = not 0 <= now - before.last < terms.repeat  # a clock that was set back repeats, too
    return Message("repeated", alarm, before.first) if is_due else None


def document(messages: Iterable[Message], store: str, head: str, at: float) -> dict[str, Any]:
    """What a webhook or a command is given, as docs/monitoring.md has it; ``text`` is all that chats show."""
    found = list(messages)
    lines = [_line(m) for m in found]
    more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
    return {
        "format": FORMAT,
        "store": store,
        "head": head,
        "at": at,
        "text": "\n".join([f"ckptsync: {_counts(found)} ({store})", *lines[:MOST], *more]),
        "alarms": [
            {"status": m.status, "key": m.alarm.key, "kind": m.alarm.kind, "first": m.first, **asdict(m.alarm)} for m in found
        ],
    }


def _line(message: Message) -> str:
    alarm = message.alarm
    if message.status == "resolved":
        return f"OVER {alarm.code}: {alarm.subject}"
    again = " (still)" if message.status == "repeated" else ""
    return f"{alarm.severity.upper()} {alarm.code}{again}: {alarm.text} -> {alarm.todo}"


def _counts(messages: list[Message]) -> str:
    counts = {status: sum(m.status == status for m in messages) for status in ("raised", "repeated", "resolved")}
    return ", ".join(f"{n} {status}" for status, n in counts.items() if n)
