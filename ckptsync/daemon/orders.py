"""What a head and its child processes say to each other: an order on the child's standard input, lines of JSON on its standard output.  Pure.

Never on a command line, nor in the environment: what every user of a machine can see holds no keys.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ckptsync.config.schema import Config
from ckptsync.daemon.phases import Line
from ckptsync.decoding import Decoder
from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.records.report import Level

Kind = Literal["consolidate", "verify", "retain"]


class Order(msgspec.Struct, frozen=True):
    """``kind`` of work on a ``run``'s ``location``, or on all of them, of ``size`` bytes; ``level`` of a verification; ``now``: seconds on this machine's clock."""

    kind: Kind
    run: str = ""
    location: str = ""
    size: int = 0
    level: Level | None = None
    now: float = 0.0

    @property
    def subject(self) -> str:
        """As people are told."""
        return f"{self.run}/{self.location}" if self.location else self.run or "every run"


class Brief(msgspec.Struct, frozen=True):
    """All that a child is given.  ``parent``: the process that it must not outlive."""

    order: Order
    config: Config
    parent: int


class At(msgspec.Struct, frozen=True, tag="at"):
    """It gets on: ``done`` of ``total`` bytes, 0 where nobody knows."""

    done: int = 0
    total: int = 0


class Done(msgspec.Struct, frozen=True, tag="done"):
    """It has ended well.  ``changed``: whether the store is another now; ``errors``: for `ckptsync status`, such as what is damaged."""

    lines: tuple[Line, ...] = ()
    errors: tuple[str, ...] = ()
    changed: bool = False


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """It could not be done.  ``passes``: whether that may pass by itself; ``is_ours``: our bug, or a process that was killed."""

    text: str
    hint: str = ""
    exit_code: int = 1
    passes: bool = False
    is_ours: bool = False

    def __str__(self) -> str:
        return self.text


Message = At | Done | Failed
End = Done | Failed

_BRIEF = Decoder(Brief, "an order")
_MESSAGE: Decoder[Message] = Decoder(Message, "a message")  # type: ignore[arg-type]  # a union is no type to mypy


def encode(said: Brief | Message) -> bytes:
    """One line."""
    return msgspec.json.encode(said) + b"\n"


def brief(line: bytes) -> Brief:
    """Raises Corrupt."""
    return _BRIEF.decode(line, "standard input")


def message(line: bytes) -> Message | None:
    """``None`` of what is no message: a child must not be able to harm its parent."""
    try:
        return _MESSAGE.decode(line, "a child")
    except Corrupt:
        return None


def failure(e: CkptsyncError) -> Failed:
    """An operator's error; those of a store or a network pass by themselves."""
    return Failed(str(e), e.hint, e.exit_code, passes=e.exit_code == 4)
