"""What an alarm is, and which alarms are sent to people, and when.

An alarm names a fault that a person must know: its subject, since when, and what to do. Sending the
same alarm at each overview would be noise, so `decide` compares the alarms that hold with those
that were sent: a message goes out when an alarm is raised, again after a while, and when it is
over. Pure; times are seconds of one clock. The configuration imports this module: it stays light.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import Any, Literal, get_args

from ckptsync.quantities import clean

FORMAT = 1
LONGEST = 1000  # characters of each text of an alarm
HOLD = 90.0
"""Seconds for which an alarm must not hold before it is over: one that comes and goes is one."""
MOST = 20  # alarms in a message's text
MOST_OF_CODE = 3  # of them with the same code
SHOWN = 400  # characters of each sentence in a message's text: services take some thousands in all
_LAST = 253402300799.0  # the last second that a date can name

Severity = Literal["critical", "warning"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
AlarmKind = Literal["damage", "weights", "stall", "lost-node", "full", "late", "clock"]
KINDS: tuple[AlarmKind, ...] = get_args(AlarmKind)
MessageStatus = Literal["raised", "repeated", "resolved"]
CODES: dict[str, AlarmKind] = {
    "damaged": "damage",
    "unreadable": "damage",
    "conflict": "damage",
    "unnamed": "damage",
    "nonfinite": "damage",
    "weights": "weights",
    "stalled": "stall",
    "node-lost": "lost-node",
    "no-head": "lost-node",
    "store-away": "lost-node",
    "disk-full": "full",
    "spool-full": "full",
    "store-full": "full",
    "no-space": "full",
    "incomplete": "late",
    "waiting": "late",
    "unconsolidated": "late",
    "unverified": "late",
    "unread": "late",
    "no-config": "late",
    "doubtful": "late",
    "blocked": "late",
    "event-failed": "late",
    "clock": "clock",
}
"""The kind of every code; `alerts.on` names kinds."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One fault, named by ``code`` and ``subject`` (a location, a run, a node, a path).

    ``since``: seconds, None if unknown; ``todo``: what a person should do. Texts hold names and
    errors from the store, and go to terminals, chats, mails and logs; so they are cleaned, and cut
    to `LONGEST`, when an alarm is made.
    """

    code: str
    subject: str
    severity: Severity
    since: float | None
    text: str
    todo: str

    def __post_init__(self) -> None:
        """Escape control characters in the texts, and cut each to `LONGEST` characters."""
        for name in ("subject", "text", "todo"):
            object.__setattr__(self, name, clean(getattr(self, name), LONGEST))

    @property
    def kind(self) -> AlarmKind:
        """Return the kind of its code, as in `alerts.on`."""
        return CODES[self.code]

    @property
    def key(self) -> str:
        """Return code and subject, the same as long as the alarm holds."""
        return f"{self.code} {self.subject}"


@dataclass(frozen=True, slots=True)
class Patience:
    """The times after which alarms are raised, in seconds.

    ``node``: of a node's silence. ``period``: within which every byte is read again. ``slow``: for
    a save to be completed, uploaded or consolidated. ``steps``: how many usual intervals a run may
    be without a checkpoint, but never less than ``least``. ``over``: after which something that no
    longer changes raises no alarm. ``ended``, or ten usual intervals if that is longer: after which
    a training without a hook counts as ended.
    """

    node: float = 600.0
    period: float = 7 * 86400.0
    slow: float = 3600.0
    steps: float = 3.0
    least: float = 900.0
    over: float = 7 * 86400.0
    ended: float = 86400.0


@dataclass(frozen=True, slots=True)
class SentAlarm:
    """An alarm, when it was sent ``first`` and ``last``, and since when it is ``gone``, else 0."""

    alarm: Alarm
    first: float
    last: float
    gone: float = 0.0


Memory = Mapping[str, SentAlarm]
"""Alarms already sent, by key. If this is lost, active alarms are sent again and ends are not."""


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a message: an alarm, its status, and when it was sent ``first``."""

    status: MessageStatus
    alarm: Alarm
    first: float


@dataclass(frozen=True, slots=True)
class Decision:
    """The messages to send now, and the memory after that: ``if_sent`` or ``if_not_sent``."""

    messages: tuple[Message, ...]
    if_sent: Memory
    if_not_sent: Memory


@dataclass(frozen=True, slots=True)
class Channel:
    """A channel of alerts: messages that were ``delivered``, tries that ``failed``."""

    channel: str
    delivered: int
    failed: int


@dataclass(frozen=True, slots=True)
class Terms:
    """``kinds`` of alarms that are sent; ``repeat``: seconds."""

    kinds: tuple[str, ...]
    repeat: float


def decide(alarms: Iterable[Alarm], memory: Memory, terms: Terms, now: float) -> Decision:
    """Return the messages to send now, given the alarms that hold.

    An alarm is raised if it is new or has become critical, repeated once ``terms.repeat`` has
    passed or the clock was set back, and resolved once it has not held for `HOLD`. Alarms of other
    kinds than ``terms.kinds`` count as not holding.
    """
    holding = {a.key: a for a in alarms if a.kind in terms.kinds}
    if_not_sent = {
        key: replace(record, gone=0.0 if key in holding else record.gone or now)
        for key, record in memory.items()
    }
    messages = []
    for key, alarm in holding.items():
        before = memory.get(key)
        if before is None:
            messages.append(Message("raised", alarm, now))
        elif SEVERITIES.index(alarm.severity) < SEVERITIES.index(before.alarm.severity):
            messages.append(Message("raised", alarm, before.first))
        elif not 0 <= now - before.last < terms.repeat:  # a clock that was set back repeats, too
            messages.append(Message("repeated", alarm, before.first))
    if_sent = {m.alarm.key: SentAlarm(m.alarm, m.first, now) for m in messages}
    over = [record for record in if_not_sent.values() if record.gone and now - record.gone >= HOLD]
    messages += [Message("resolved", record.alarm, record.first) for record in over]
    remembered = {key: record for key, record in if_not_sent.items() if record not in over}
    return Decision(tuple(messages), remembered | if_sent, if_not_sent)


def document(messages: Sequence[Message], store: str, head: str, now: float) -> dict[str, Any]:
    """Return the document that channels deliver (docs/monitoring.md), with a title and a text.

    Its severity is the highest of those that hold, or "resolved". Its text has some of the alarms.
    """
    counts = Counter(m.status for m in messages)
    statuses = (status for status in get_args(MessageStatus) if counts[status])
    heading = ", ".join(f"{counts[status]} {status}" for status in statuses)
    holding = [m.alarm.severity for m in messages if m.status != "resolved"]
    severity = min(holding, key=SEVERITIES.index, default="resolved")
    alarms = [
        {"status": m.status, "key": m.alarm.key, "kind": m.alarm.kind, "first": m.first}
        | asdict(m.alarm)
        for m in messages
    ]
    origin = {"store": store, "head": head, "at": now}
    return _document(origin, heading, severity, _entries(messages, store), alarms)


def test_document(store: str, head: str, now: float) -> dict[str, Any]:
    """Return the document of `ckptsync alert test`."""
    entry = f"Sent by `ckptsync alert test` on {clean(head, LONGEST)}: alerts arrive here."
    origin = {"store": store, "head": head, "at": now}
    return _document(origin, "test", "test", [entry, "Nothing is wrong."], [])


def _document(
    origin: Mapping[str, Any],
    heading: str,
    severity: str,
    entries: Iterable[str],
    alarms: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Return a message for a channel as JSON values.

    ``about``: its store, head and time. ``entries``: the lines of its text.
    """
    title = f"ckptsync: {heading} ({origin['store']})"
    text = "\n".join([title, *entries])
    texts = {"severity": severity, "title": title, "text": text}
    return {"format": FORMAT, **origin, **texts, "alarms": alarms}


def _entries(messages: Sequence[Message], store: str) -> Iterator[str]:
    """Yield the text of each alarm: at most `MOST_OF_CODE` of a status and code, and `MOST` in all.

    A line counts those left out of each status and code.
    """
    groups: dict[tuple[str, str], list[Message]] = {}
    for message in messages:
        groups.setdefault((message.status, message.alarm.code), []).append(message)
    room = MOST
    for (status, code), group in groups.items():
        shown = group[: min(MOST_OF_CODE, room)]
        room -= len(shown)
        yield from map(_entry, shown)
        if more := len(group) - len(shown):
            are_over = " are over" if status == "resolved" else ""
            listing = shlex.join(["ckptsync", "status", "--store", store])
            yield f"and {more} more {code}{are_over}: `{listing}` lists what holds"


def _entry(message: Message) -> str:
    """Return the text of one alarm."""
    alarm = message.alarm
    if message.status == "resolved":
        return f"OVER {alarm.code}: {alarm.subject}"
    repeated = " (still)" if message.status == "repeated" else ""
    began = min(max(alarm.since or message.first, 0.0), _LAST)
    since = datetime.fromtimestamp(began, timezone.utc)
    return (
        f"{alarm.severity.upper()} {alarm.code}{repeated}: {clean(alarm.text, SHOWN)}\n"
        f"  since {since:%Y-%m-%d %H:%M} UTC\n"
        f"  to do: {clean(alarm.todo, SHOWN)}"
    )
