"""Values that stand for what a pickle mentions: names that are never imported, and calls that are never made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


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


class Unknown(Made):
    """The same of a class that nobody here knows: what is put into it afterwards, as into lists and dictionaries, is let go of."""

    __slots__ = ()


class Stated:
    """What a pickle would have made of a class whose instances are made without arguments and then given their attributes.

    A layout that has such objects by the million derives a class and declares it in place of a constructor.  The machine makes
    it with no arguments and calls `take` with names and values by turns, once; the dictionary that held them is not kept.
    """

    __slots__ = ()
    alike: ClassVar[
        tuple[bytes, ...]
    ] = ()  # how the pickle of one may end, if many are the same byte for byte: these share one object
    is_key: ClassVar[bool] = False  # whether a dictionary has them by the million as keys, with values that are `Stated` too

    def take(self, items: list[Any]) -> None:
        """Become what ``[name, value, name, value, …]`` says; raises Corrupt if that is not what the class has.

        Names are not checked yet: they may be anything that a pickle can hold, or given twice, and must not be hashed before.
        """
        raise NotImplementedError

    def count(self) -> int:
        """How long the list is that it took: one that another object has too is walked again."""
        return 0

    @classmethod
    def several(cls, names: Sequence[Any], columns: Sequence[Sequence[Any]]) -> list[Any]:
        """Objects that have values for the same names: the first of each column is for the first of them.  Each is as `take` makes it."""
        made = []
        for values in zip(*columns, strict=True):
            one = cls()
            one.take([of_pair for pair in zip(names, values, strict=True) for of_pair in pair])
            made.append(one)
        return made


Build = Callable[[Name, tuple[Any, ...]], Any] | type[Stated]
