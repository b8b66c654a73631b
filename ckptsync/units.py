"""Durations (``1h30m``), sizes (``5 GB``) and text of strangers as people read them."""

from __future__ import annotations


def clean(text: str, most: int = 0) -> str:
    """``text`` with control characters and marks of direction made visible, and no longer than ``most`` characters, if that is not 0.

    Names and errors in a store come from anyone who may write to it; terminals and chats obey what is in them.
    """
    if most and len(text) > most:
        text = f"{text[: most - 1]}…"
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def show_duration(seconds: float) -> str:
    """The two largest units: ``90.0`` → ``1m30s``.  Below a minute, tenths."""
    if seconds < 0:
        return "-" + show_duration(-seconds)
    if seconds < 60:
        return f"{seconds:.1f}s".replace(".0s", "s")
    parts: list[str] = []
    left = round(seconds)
    for unit, length in _UNITS.items():
        count, left = divmod(left, length)
        if count or parts:
            parts.append(f"{count}{unit}")
    return "".join(p for p in parts[:2] if not p.startswith("0"))


def show_size(size: int) -> str:
    """Three figures in powers of 1000, as ``ls --si`` would: ``5_000_000_000`` → ``5 GB``."""
    value, unit = float(size), "B"
    for larger in ("KB", "MB", "GB", "TB", "PB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.3g} {unit}"
