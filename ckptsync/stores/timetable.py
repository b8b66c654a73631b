"""When how many bytes a second may go, in rclone's notation (rclone.org/docs, ``--bwlimit``).  Pure.

``08:00,50M 19:00,off`` is said of every day, ``Mon-08:00,10M Sat-00:00,off`` of a week, ``50MB/s`` of always.
"""

from __future__ import annotations

import bisect
import math
import re
from dataclasses import dataclass

DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
DAY = 24 * 60
_SLOT = re.compile(r"(?:([A-Za-z]+)-)?([0-9]{1,2}):([0-9]{2}),(\S+)")
_RATE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGT]i?)?(B)?(/s)?", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class Timetable:
    """``starts``: minutes of the week, counted from Monday 00:00, in order; ``rates``: bytes a second from then on, or ``None``: no limit."""

    starts: tuple[int, ...]
    rates: tuple[float | None, ...]

    def rate(self, weekday: int, hour: int, minute: int) -> float | None:
        """What holds at a local time; Monday is 0.  Before the first time of the week, what the last one says."""
        return self.rates[bisect.bisect_right(self.starts, weekday * DAY + hour * 60 + minute) - 1]

    @property
    def is_unlimited(self) -> bool:
        """Whether there never is a limit."""
        return all(rate is None for rate in self.rates)


def parse(text: str) -> Timetable:
    """Raises ValueError that says what is wanted."""
    words = text.split()
    if not words:
        raise ValueError("an empty bandwidth: a rate such as 50MB/s, a timetable such as '08:00,50M 19:00,off', or off is wanted")
    if len(words) == 1 and "," not in words[0]:
        return Timetable((0,), (_rate(words[0]),))
    found: dict[int, float | None] = {}
    for word in words:
        starts, rate = _slot(word)
        for start in starts:
            if start in found:
                raise ValueError(f"{word!r}: this time is given twice")
            found[start] = rate
    return Timetable(tuple(sorted(found)), tuple(found[start] for start in sorted(found)))


def _slot(word: str) -> tuple[list[int], float | None]:
    """The minutes of the week at which it begins, one or one of each day, and the rate."""
    matched = _SLOT.fullmatch(word)
    if not matched:
        raise ValueError(f"{word!r} is not a time and a rate: such as 08:00,50M or Sat-00:00,off is wanted")
    day, hour, minute = matched[1], int(matched[2]), int(matched[3])
    if hour > 23 or minute > 59:
        raise ValueError(f"{word!r}: there is no such time of day")
    days = [n for n, name in enumerate(DAYS) if day is None or (len(day) > 2 and name.startswith(day.lower()))]
    if not days:
        raise ValueError(f"{word!r}: there is no such day, one of Mon Tue Wed Thu Fri Sat Sun is wanted")
    return [n * DAY + hour * 60 + minute for n in days], _rate(matched[4])


def _rate(text: str) -> float | None:
    """Bytes a second.  ``K M G T`` are powers of 1024, as they are rclone's, and so are ``KiB``…; ``KB MB GB TB`` are of 1000."""
    if text.lower() == "off":
        return None
    matched = _RATE.fullmatch(text)
    if not matched or not (matched[2] or matched[3]):  # rclone takes a bare number for KiB, others for bytes: so it says nothing
        raise ValueError(f"{text!r} is not a bandwidth: a rate with its unit, such as 50MB/s or 8MiB/s, or off is wanted")
    unit = (matched[2] or "").upper()
    base = 1000.0 if matched[3] and not unit.endswith("I") else 1024.0
    rate = float(matched[1]) * math.pow(base, _POWERS[unit[0]] if unit else 0)
    if rate < 1:
        raise ValueError(f"{text!r}: nothing could ever be sent; off means no limit")
    return rate
