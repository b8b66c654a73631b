"""The errors that a command can end with: one class for each thing that the operator does next.

A class has an exit code, so that scripts and services can decide by it:

CkptsyncError           1  read the message
├── ConfigError         2  fix the configuration, or the command
├── Incomplete          3  wait, or fetch what is named: something is missing
├── StoreError          4  storage or network: look at it, then try again
│   ├── Transient       4  (the same may succeed in a moment: `stores.retry` tries again)
│   ├── NotFound        4  (permanent: never retried)
│   └── Exists          4  (permanent: somebody else wrote that name first)
├── Unsupported         5  a layout, or a version, that this program does not know
└── Corrupt            10  stop, and investigate: bytes are not what they should be

A message is lower case and names the file or object first, then what was found and what was
expected; ``hint`` says what to do next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar


class CkptsyncError(Exception):
    """An error that the operator can act on; its message is one line.

    ``hint``: what to do next, or empty.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


E = TypeVar("E", bound=CkptsyncError)


class ConfigError(CkptsyncError):
    """The configuration or the command line asks for something that cannot be."""

    exit_code = 2


class Incomplete(CkptsyncError):
    """Something that is needed has not arrived, or was never there."""

    exit_code = 3


class StoreError(CkptsyncError):
    """Storage or network failed, and will fail again until somebody changes something."""

    exit_code = 4


class Transient(StoreError):
    """The same call may succeed if it is made again, ``after`` seconds later or more."""

    def __init__(self, message: str, *, hint: str = "", after: float = 0.0) -> None:
        super().__init__(message, hint=hint)
        self.after = after


class NotFound(StoreError):
    """There is no such name; trying again does not help."""


class Exists(StoreError):
    """The name exists already; trying again does not help.

    ``is_same``: whether the stored file was compared and is the file that should have been written;
    ``None`` if the store did not compare them.
    """

    def __init__(self, message: str, *, hint: str = "", is_same: bool | None = None) -> None:
        super().__init__(message, hint=hint)
        self.is_same = is_same


class Unsupported(CkptsyncError):
    """A layout, an option or a format number that this program does not know."""

    exit_code = 5


class Corrupt(CkptsyncError):
    """Bytes are not what their metadata, their digest or their format says."""

    exit_code = 10


def without_frames(e: E) -> E:
    """Return a copy of an error, to keep or raise again, without traceback, cause and context.

    A traceback refers to all frames that the error passed, and so to the data that they had read,
    as long as the error is kept; each raise adds frames.
    """
    copy: E = type(e).__new__(type(e), *e.args)
    copy.__dict__.update(e.__dict__)
    return copy


def not_parsed(e: BaseException, name: str, expected: str, hint: str = "") -> Corrupt:
    """Return the Corrupt that says that ``name`` is not ``expected``, and why in 200 characters.

    ``expected``: with its article, such as "an index".
    """
    reason = str(e)[:200]  # an error stands on one line
    if isinstance(e, RecursionError):
        reason = "nested too deeply"
    elif isinstance(e, MemoryError):
        reason = "it takes more memory than there is"
    return Corrupt(f"{name}: not {expected}: {reason}", hint=hint)


@contextmanager
def name_in_errors(prefix: str) -> Iterator[None]:
    """In the block, raise a Corrupt or Unsupported again with ``prefix: `` before its text.

    Its hint is kept. A text that begins with ``prefix``, and any other error, is not changed.
    """
    try:
        yield
    except (Corrupt, Unsupported) as e:
        if str(e).startswith(prefix):
            raise
        raise type(e)(f"{prefix}: {e}", hint=e.hint) from e
