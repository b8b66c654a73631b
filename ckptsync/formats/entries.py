"""Entries of a dictionary that a pickle has by the million, hundreds at a time: objects as keys and as values, each like the one before.

The bytes of two such entries differ in the values of attributes alone.  So one entry is taken apart, and a pattern is made of its
bytes with a gap for every value: it finds all that follow, and their values are read column by column.  What does not fit is left to
`ckptsync.formats.frequent`; what fits has the same outcome there, memo included.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ckptsync.formats.machine import GONE, NUMBER, OBJECT, TUPLE, Machine
from ckptsync.formats.mentioned import Stated

_MENTION, _SMALL = rb"(?:h.|j....)", rb"(?:K.|M..|J....)"
_NUMBERS = b"(?:" + b"|".join(_SMALL * n + code for n, code in ((1, rb"\x85"), (2, rb"\x86"), (3, rb"\x87"))) + b")"
# The values of attributes, each with its groups: `_COLUMNS` says what is made of them.
_VALUES = {
    "text": rb"\x8c(.)([^\x94]*)\x94",
    "sized": b"(" + _NUMBERS + rb")\x94\x85\x94R\x94",  # behind a name: it is called with that tuple alone, as torch.Size is
    "mention": b"(" + _MENTION + b")",
    "number": b"(" + _SMALL + rb"|\x8a\x05.{5}|\x8a\x06.{6})",
}
_BEGIN = re.compile(b"(" + _MENTION + rb")\)\x81\x94}\x94\(", re.DOTALL)  # a class, an object of it, and its attributes begin
_NAMED = re.compile(_MENTION, re.DOTALL)
_END = b"ub"
_REST = b"|(.+)"
_CALL = "sized"
_LEAST, _MOST = 1 << 10, 1 << 16  # bytes that are looked through at once: a pickler's frame has as many
_MOST_PATTERNS = 64
_MOST_WASTED = 1000
_MOST_ATTRIBUTES = 16
_LONGEST_BEGIN = 11
_SIGNED = struct.Struct("<xi")
_LONG = struct.Struct("<I").unpack_from
Column = tuple[list[Any], Sequence[Sequence[Any]]]  # values, and what the memo gets of them, each a list of its own


@dataclass(frozen=True, slots=True)
class _Attribute:
    """``called`` is the name that a value is the call of."""

    name: Any
    sort: str
    called: Any


@dataclass(frozen=True, slots=True)
class _Like:
    """Entries of one pattern, whose last group is the bytes behind the last of them."""

    pattern: re.Pattern[bytes]
    objects: tuple[tuple[type[Stated], tuple[_Attribute, ...]], ...]


class Entries:
    """What one pickle's entries look like."""

    __slots__ = ("_known", "_like", "_machine", "_reach", "_wasted")

    def __init__(self, machine: Machine) -> None:
        self._machine, self._known, self._reach = machine, dict[bytes, _Like](), _LEAST
        self._wasted = 0  # looks that found nothing, less the entries that others found
        self._like: _Like | None = None

    def read(self, at: int, stack: list[Any], memo: list[Any]) -> int:
        """Put the entries onto the stack, in place of the class of the first key, whose attributes begin at ``at``.

        The answer is where they end, or ``at`` if there are none that can be read so: then nothing has changed.
        """
        start = self._start(at, stack[-1], memo) if self._wasted < _MOST_WASTED else None
        if start is None:
            return at
        for like in self._candidates(start, memo):
            limit = min(start + self._reach, len(self._machine.data))
            rows = like.pattern.findall(self._machine.data, start, limit)
            rest = len(rows[-1][-1]) if rows else 0
            if rest:
                rows.pop()
            made = self._made(like, rows, memo) if rows else None
            if made:
                self._reach = min(2 * self._reach, _MOST)
                self._wasted -= len(rows)
                self._like = like
                stack[-1:], share = made
                memo += share
                self._machine.room -= OBJECT * len(like.objects) * len(rows)
                self._machine.check_room()
                return limit - rest
        self._reach = _LEAST
        self._wasted += 1
        return at

    def _start(self, at: int, name: Any, memo: list[Any]) -> int | None:
        """Where the class is mentioned whose object's attributes begin at ``at``."""
        for length in (_LONGEST_BEGIN, _LONGEST_BEGIN - 3):
            begin = _BEGIN.fullmatch(self._machine.data, max(at - length, 0), at)
            if begin and _recalled(begin[1], memo) is name:
                return at - length
        return None

    def _candidates(self, at: int, memo: list[Any]) -> Iterator[_Like]:
        """The pattern that was right last, then that of the entry itself."""
        last = self._like
        if last:
            yield last
        found = self._learned(at, memo)
        if found and found is not last:
            yield found

    def _learned(self, at: int, memo: list[Any]) -> _Like | None:
        pattern, objects = b"", []
        for _ in ("key", "value"):
            begin = _BEGIN.match(self._machine.data, at)
            kind = self._machine.kinds.get(id(_recalled(begin[1], memo))) if begin else None
            if not begin or not kind or kind.alike:
                return None
            pattern, at = pattern + re.escape(begin[0]), begin.end()
            attributes: list[_Attribute] = []
            while self._machine.data[at : at + 2] != _END:
                read = self._attribute(at, memo)
                if not read or len(attributes) >= _MOST_ATTRIBUTES:
                    return None
                attribute, own, at = read
                attributes.append(attribute)
                pattern += own
            objects.append((kind, (*attributes,)))
            pattern += _END
            at += len(_END)
        if pattern not in self._known and len(self._known) < _MOST_PATTERNS:
            self._known[pattern] = _Like(re.compile(pattern + _REST, re.DOTALL), tuple(objects))
        return self._known.get(pattern)

    def _attribute(self, at: int, memo: list[Any]) -> tuple[_Attribute, bytes, int] | None:
        """It, its pattern and its end."""
        named = _NAMED.match(self._machine.data, at)
        name = _recalled(named[0], memo) if named else GONE
        if not named or name is GONE:
            return None
        called = _NAMED.match(self._machine.data, named.end())
        if called and id(_recalled(called[0], memo)) in self._machine.builds:
            value = _SORTS[_CALL].match(self._machine.data, called.end())
            if value:
                attribute = _Attribute(name, _CALL, _recalled(called[0], memo))
                return attribute, re.escape(named[0] + called[0]) + _VALUES[_CALL], value.end()
        for sort in ("text", "number", "mention"):
            value = _SORTS[sort].match(self._machine.data, named.end())
            if value:
                return _Attribute(name, sort, None), re.escape(named[0]) + _VALUES[sort], value.end()
        return None

    def _made(self, like: _Like, rows: list[tuple[bytes, ...]], memo: list[Any]) -> tuple[list[Any], list[Any]] | None:
        """What the stack and the memo get of entries; None if the pattern was deceived."""
        groups: Iterator[Sequence[bytes]] = iter(zip(*rows, strict=True))
        stacked: list[list[Any]] = []
        shares: list[Sequence[Any]] = []
        for kind, attributes in like.objects:
            columns: list[Column] = []
            for attribute in attributes:
                column = _COLUMNS[attribute.sort](groups, self._machine, memo, attribute.called)
                if column is None:
                    return None
                columns.append(column)
            made = kind.several([a.name for a in attributes], [values for values, _ in columns])
            stacked.append(made)
            shares += (made, [GONE] * len(rows), *chain.from_iterable(share for _, share in columns))
        return _by_turns(stacked), _by_turns(shares)


def _by_turns(columns: Sequence[Sequence[Any]]) -> list[Any]:
    """The first of each, the second of each, …"""
    found: list[Any] = [None] * (len(columns) * len(columns[0]))
    for number, column in enumerate(columns):
        found[number :: len(columns)] = column
    return found


def _recalled(mention: bytes, memo: list[Any]) -> Any:
    index = mention[1] if len(mention) == 2 else _LONG(mention, 1)[0]
    return memo[index] if index < len(memo) else GONE


def _texts(groups: Iterator[Sequence[bytes]], machine: Machine, _memo: list[Any], _called: Any) -> Column | None:
    lengths, texts = next(groups), next(groups)
    if list(map(len, texts)) != list(b"".join(lengths)):
        return None
    machine.room -= TUPLE * len(texts) + sum(map(len, texts))
    values = [text.decode("utf-8", "surrogatepass") for text in texts]
    return values, (values,)


def _mentions(groups: Iterator[Sequence[bytes]], _machine: Machine, memo: list[Any], _called: Any) -> Column | None:
    mentions = next(groups)
    known = {mention: _recalled(mention, memo) for mention in set(mentions)}
    return None if any(value is GONE for value in known.values()) else ([known[mention] for mention in mentions], ())


def _numbers(groups: Iterator[Sequence[bytes]], machine: Machine, _memo: list[Any], _called: Any) -> Column:
    codes = next(groups)
    if set(map(len, codes)) == {_SIGNED.size}:
        machine.room -= NUMBER * len(codes)
        return [number for (number,) in _SIGNED.iter_unpack(b"".join(codes))], ()
    known = {code: _number(code) for code in set(codes)}
    machine.room -= NUMBER * len(known)
    return [known[code] for code in codes], ()


def _number(code: bytes) -> int:
    if len(code) <= 3:
        return int.from_bytes(code[1:], "little")
    return int.from_bytes(code[1 if len(code) == 5 else 2 :], "little", signed=True)


def _calls(groups: Iterator[Sequence[bytes]], machine: Machine, _memo: list[Any], called: Any) -> Column | None:
    """A tuple that is called with the same numbers is one object, as in `ckptsync.formats.frequent`."""
    codes, build = next(groups), machine.builds[id(called)]
    known: dict[bytes, tuple[Any, Any, Any]] = {}
    for code in set(codes):
        numbers = tuple([_number(one) for one in _EACH(code, 0, len(code) - 1)])
        args = (numbers,)
        known[code] = numbers, args, build(called, args)
        if type(known[code][-1]) is not tuple:
            return None
    machine.room -= 2 * TUPLE * len(known)
    made = [known[code] for code in codes]
    share = list(zip(*made, strict=True))
    return list(share[-1]), share


_EACH = re.compile(_SMALL, re.DOTALL).findall
_SORTS = {sort: re.compile(pattern, re.DOTALL) for sort, pattern in _VALUES.items()}
_COLUMNS: dict[str, Callable[[Iterator[Sequence[bytes]], Machine, list[Any], Any], Column | None]] = {
    "text": _texts,
    "sized": _calls,
    "mention": _mentions,
    "number": _numbers,
}
