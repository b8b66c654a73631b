"""Durations (``1h30m``) and sizes (``5 GB``) as text, for options, configuration and messages.

Also text that is safe to print (`clean`), and the waits between retries (`backoff`).
"""

from __future__ import annotations

import re

_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?(?:ms|s|m|h|d))+")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

LONGEST = 36500 * 86400.0  # s: Python waits no longer than 292 years
LARGEST = 2**63 - 1  # bytes of a file

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([KMGT]i?)?B?", re.IGNORECASE)
_BYTES = {
    "": 1,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


def clean(text: str, most: int = 0) -> str:
    """Return text that is safe to print: control and direction characters become escapes.

    So do newlines and tabs. Anyone who may write to a store chooses names and errors in it, and a
    terminal or a chat obeys such characters. The text is first cut to ``most`` characters with
    ``…`` as the last, unless ``most`` is 0; escapes may lengthen it.
    """
    if most and len(text) > most:
        text = f"{text[: most - 1]}…"
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def show_duration(seconds: float) -> str:
    """Return seconds as text: ``90.0`` is ``1m30s``; a negative duration begins with ``-``.

    It has the two largest units, without one that is zero; below a minute, tenths of a second.
    """
    if seconds < 0:
        return "-" + show_duration(-seconds)
    if seconds < 60:
        return f"{seconds:.1f}s".replace(".0s", "s")
    parts: list[str] = []
    remainder = round(seconds)
    for unit in ("d", "h", "m", "s"):
        count, remainder = divmod(remainder, int(_SECONDS[unit]))
        if count or parts:
            parts.append(f"{count}{unit}")
    return "".join(p for p in parts[:2] if not p.startswith("0"))


def show_size(size: int) -> str:
    """Return a size with three figures, in powers of 1000: ``5_000_000_000`` → ``5 GB``."""
    value, unit = float(size), "B"
    for larger in ("KB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"


def parse_duration(text: str) -> float:
    """Return the seconds that a text such as ``1h30m`` says; raise ValueError if it is no duration.

    Units are ``ms s m h d``, and several may follow each other; only ``0`` needs no unit.
    """
    text, examples = text.strip(), "such as 10s, 5m, 2h or 7d"
    if text == "0":
        return 0.0
    if not _DURATION.fullmatch(text):
        why = f"expected a number and a unit, {examples}"
        raise ValueError(f"{text!r} is not a duration: {why}")
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in _DURATION_PART.findall(text))
    if seconds > LONGEST:
        why = f"it is longer than 36500d; expected one {examples}"
        raise ValueError(f"{text[:40]!r} is not a duration: {why}")
    return seconds


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``5GB`` says; raise ValueError if it is no size.

    ``KB MB GB TB`` are powers of 1000 and ``KiB MiB GiB TiB`` of 1024; no unit is bytes.
    """
    match, examples = _SIZE.fullmatch(text.strip()), "such as 5GB or 512MiB"
    if not match:
        raise ValueError(f"{text!r} is not a size: expected a number and a unit, {examples}")
    size = float(match[1]) * _BYTES[(match[2] or "").upper()]
    if size > LARGEST:
        raise ValueError(f"{text[:40]!r} is not a size: it is too large; expected one {examples}")
    return round(size)


def backoff(tries: int, first: float, longest: float) -> float:
    """Return the seconds to wait before the next try, after ``tries`` (1 or more) failures.

    They begin with ``first``, and double with each failure up to ``longest``. Waits nothing itself.
    """
    return min(longest, first * 2.0 ** min(tries - 1, 32))
