"""What waits to be sent, and which lane may take it: a wide one whatever is next, a narrow one what is small.  Pure.

Neither overtakes: of one run nothing begins before what goes before it by the operator's order; what has begun may end later.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptsync.worker.upload import small_at_once

SMALL = 256 << 20  # bytes of a save that the narrow lane takes: some seconds of most networks

Name = tuple[str, str]
"""Of a run, and of a checkpoint in it: what is said in the store of a node that sends one is said once, so nobody sends two saves of one name."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a lane may take: ``most`` bytes of a save (``None``: any), ``threads`` large files at once, ``small`` files that cost a round trip each."""

    most: int | None
    threads: int
    small: int


@dataclass(frozen=True, slots=True)
class Job:
    """One save to send.  ``save`` tells it from others.  ``work`` keeps for itself what an operator can act on, and raises nothing else than bugs."""

    save: object
    name: Name
    size: int
    work: Callable[[Share], None]


def following(
    lines: Mapping[object, Sequence[Job]], in_hand: Collection[Name], most: int | None, least: int = 0
) -> tuple[object, Job] | None:
    """The first that may begin of at most ``most`` bytes, and more than ``least``: they are another lane's, which is free.  Pure.

    Of each run only the first: none begins before one that goes before it, whatever that one waits for.
    """
    for line, jobs in lines.items():
        for job in _heads(jobs):
            if job.name not in in_hand and (most is None or job.size <= most) and not (least and job.size <= least):
                return line, job
    return None


def _heads(jobs: Iterable[Job]) -> Iterable[Job]:
    """The first of each run."""
    found: dict[str, Job] = {}
    for job in jobs:
        found.setdefault(job.name[0], job)
    return found.values()


def whole(threads: int) -> Share:
    """For all that is sent at once; who asks for one file at a time gets that."""
    return Share(None, threads, small_at_once(threads))


def shares(threads: int) -> tuple[Share, ...]:
    """Of ``threads`` large files at once; those of the narrow lane's saves are mostly none.  Pure."""
    if threads <= 1:
        return (whole(threads),)
    small = small_at_once(threads)
    return (Share(None, threads - 1, small - small // threads), Share(SMALL, 1, small // threads))
