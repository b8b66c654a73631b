"""Values that stand for what a pickle mentions: names that are never imported, and calls that are never made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Name:
    """A global that a pickle mentions, as words."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(slots=True, eq=False)
class Made:
    """What a pickle would have made by calling ``name``: its arguments and its state, as plain values."""

    name: Name
    args: tuple[Any, ...]
    state: Any = None


Build = Callable[[Name, tuple[Any, ...]], Any]
