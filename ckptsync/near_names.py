"""Find the name that somebody meant who mistyped it: the "did you mean" of all messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def near_names(typed: str, names: Iterable[str], most: int = 1) -> list[str]:
    """Return at most ``most`` names that resemble ``typed``, the nearest first; [] if none does.

    Longer names that begin with ``typed`` come last, sorted.  Never ``typed`` itself.
    """
    candidates = sorted({name for name in names if name != typed})
    nearest = difflib.get_close_matches(typed, candidates, most, 0.6)
    longer = (name for name in candidates if typed and name.startswith(typed))
    return list(dict.fromkeys([*nearest, *longer]))[:most]


def did_you_mean(typed: str, names: Iterable[str]) -> str:
    """Return the question whether the nearest name was meant, or "" if none is near."""
    nearest = near_names(typed, names)
    return f"did you mean {nearest[0]}?" if nearest else ""
