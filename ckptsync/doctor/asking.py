"""Who asks about a path, and what is told of it."""

from __future__ import annotations

import pwd
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.doctor.findings import SETUP, Finding


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks: the node, and the user whose rights count.  ``expected``: bytes of a checkpoint, where none is there yet; ``rate``: bytes a second that may be sent."""

    node: str
    uid: int
    expected: int = 0
    rate: float | None = None


def fail(kind: str, asked: Asked, path: Path, *told: str, code: int = SETUP) -> Finding:
    """``told``: what was found, why it matters, what to do."""
    what, why, hint = told
    return Finding("fail", kind, (asked.node,), str(path), what, why, hint, code)


def warn(kind: str, asked: Asked, path: Path, *told: str, code: int = SETUP) -> Finding:
    """As `fail`, of what may be well."""
    return replace(fail(kind, asked, path, *told, code=code), level="warn")


def is_directory(path: Path) -> bool:
    """Also where it cannot be reached, and nobody knows, it is none here (``Path.is_dir`` raises then)."""
    try:
        return path.is_dir()
    except OSError:
        return False


def words(e: OSError) -> str:
    """The system's own, as an error's text has them."""
    return (e.strerror or str(e)).lower()


def user(uid: int) -> str:
    """The name, or the number where there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
