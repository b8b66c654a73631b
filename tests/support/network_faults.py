"""What networks and servers do to requests, as values; and plans, which say to which request.

A plan is asked about every request (about every connection, where nobody looks into them), by one
thread at a time, and answers with a fault or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

UP, DOWN = "up", "down"  # requests; responses
CUT, END, STALL = "cut", "end", "stall"
HEADLESS = -1


@dataclass(frozen=True, slots=True)
class Break:
    """One direction is reset, ended as if all were said, or says no more after ``after`` bytes of
    its body, at the latest where this ends.

    `HEADLESS`: before its head.  DOWN is after the server has done what was asked.
    """

    side: str
    how: str
    after: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """An S3 error in place of the server's response.

    ``is_done``: the server has done what was asked for all the same.
    """

    status: int
    code: str
    is_done: bool = False


Fault = Break | Answer
Plan = Callable[["Request"], "Fault | None"]


@dataclass(frozen=True, slots=True)
class Request:
    """``number`` counts from 1; ``kind`` is S3's name of the operation, or "connection"."""

    number: int
    kind: str
    target: str = ""


def harmless(_request: Request) -> None:
    """Return no fault."""


def once(kind: str, fault: Fault, nth: int = 1) -> Plan:
    """Return a plan by which the nth request of a kind ("": any) fails."""
    count = 0

    def plan(request: Request) -> Fault | None:
        nonlocal count
        count += kind in ("", request.kind)
        return fault if kind in ("", request.kind) and count == nth else None

    return plan


def always(kind: str, fault: Fault) -> Plan:
    """Return a plan by which every request of a kind ("": any) fails."""
    return lambda request: fault if kind in ("", request.kind) else None
