"""Kept by hand: what no rule lets go of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptsync.decoding import Count, FormatNumber

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Keep:
    """A person's word about a location: ``keeps`` is false where it is released again.  ``reason`` is for people."""

    run: str
    checkpoint: str
    location: str
    n: Count
    keeps: bool
    reason: str = ""
    format: FormatNumber = FORMAT


def kept(keeps: Mapping[str, Keep]) -> str:
    """Why a location is kept by hand, by all that was said of it; empty if it is not.  The highest number counts; of several that keeps."""
    last = max(((k.n, k.keeps, name) for name, k in keeps.items()), default=(0, False, ""))
    return (keeps[last[2]].reason or "kept by hand") if last[1] else ""
