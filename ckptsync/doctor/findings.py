"""What is wrong, where, why it matters, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from ckptsync.errors import ConfigError, StoreError

Level = Literal["fail", "warn"]
SETUP = ConfigError.exit_code  # a configuration, a version, a variable, a right: somebody changes it, and it is well
STORAGE = StoreError.exit_code  # the store, a disk, a file system

_KIND = re.compile(r"[a-z0-9-]{1,40}")
_LONGEST = 2000  # characters of a text


@dataclass(frozen=True, slots=True)
class Finding:
    """``kind`` is one of docs/doctor.md and does not change; ``nodes`` whose fault it is, or between which it is; ``subject``: a path, a variable, a library.

    ``exit_code``: what the command ends with because of it, if it is a failure.
    """

    level: Level
    kind: str
    nodes: tuple[str, ...]
    subject: str
    what: str
    why: str
    hint: str
    exit_code: int = SETUP

    @property
    def where(self) -> str:
        """The nodes and the subject, as they are shown."""
        return ": ".join(part for part in (", ".join(self.nodes), self.subject) if part)


def finding_of(raw: object, node: str) -> Finding | None:
    """The finding that a node published about itself; ``None`` for what is none.  Anybody who can write to the store may have written it."""
    if not isinstance(raw, dict):
        return None
    kind, level, code = raw.get("kind"), raw.get("level"), raw.get("exit_code")
    texts = [raw.get(key) for key in ("subject", "what", "why", "hint")]
    if not isinstance(kind, str) or not _KIND.fullmatch(kind) or level not in ("fail", "warn") or code not in (SETUP, STORAGE):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    subject, what, why, hint = (str(text)[:_LONGEST] for text in texts)
    return Finding(level, kind, (node,), subject, what, why, hint, code)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Each once, failures first, and the same order every time."""
    return tuple(sorted(set(findings), key=lambda f: (f.level, f.kind, f.nodes, f.subject, f.what)))


def exit_code(findings: Iterable[Finding]) -> int:
    """The greatest among failures; 0 for warnings alone."""
    return max((f.exit_code for f in findings if f.level == "fail"), default=0)
