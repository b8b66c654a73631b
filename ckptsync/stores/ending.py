"""Whether this process is about to end: then nothing is tried again, so that threads which wait for a store hold it up no longer.

A plain flag, since signal handlers may take no lock.
"""

from __future__ import annotations

from ckptsync.errors import Transient

_is_near = False


def announce() -> None:
    """It is: from now on what fails has failed."""
    _set(near=True)


def begin() -> None:
    """It is not (any more): another command begins."""
    _set(near=False)


def is_near() -> bool:
    """Whether it was announced."""
    return _is_near


def go_on(what: str) -> None:
    """Raises Transient once it was announced; ``what`` is not read to its end then."""
    if _is_near:
        raise Transient(f"{what}: not read, the process is about to end", hint="the next start goes on with it")


def _set(*, near: bool) -> None:
    global _is_near  # noqa: PLW0603 - of the whole process
    _is_near = near
