"""One finding of doctor (`Finding`): made by `fail` or `warn`, read from a store, and sorted.

Every check yields findings, so that the command, the store and Ray's callback show all of them
alike.  Imports the standard library alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from ckptsync.errors import CkptsyncError, ConfigError, StoreError

Level = Literal["fail", "warn"]
SETUP = ConfigError.exit_code  # somebody changes a configuration, a version, a variable or a right
STORAGE = StoreError.exit_code  # the store, a disk or a file system

_KIND = re.compile(r"[a-z0-9-]{1,40}")
_LONGEST = 2000  # characters of a text


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault: ``what`` was observed, why it matters, and a hint what to do.

    ``kind`` is one of docs/doctor.md and does not change.  ``nodes``: the nodes that have the
    fault, or between which it is.  ``subject``: a path, a variable, a library.  ``exit_code``: of
    the command, if this is a failure.
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
        """Return the nodes and the subject, for people."""
        return ": ".join(part for part in (", ".join(self.nodes), self.subject) if part)

    def on(self, node: str) -> Finding:
        """Return a copy of this finding whose only node is ``node``."""
        return replace(self, nodes=(node,))


def _finding(
    level: Level,
    kind: str,
    subject: object,
    what: str,
    *,
    why: str,
    hint: str,
    nodes: tuple[str, ...] = (),
    code: int = SETUP,
) -> Finding:
    """Return a finding; ``code`` is its exit code."""
    return Finding(level, kind, nodes, str(subject), what, why, hint, code)


fail = partial(_finding, "fail")  # the training would hang, end or lose files
warn = partial(_finding, "warn")  # the training may hang, end or lose files


def refusal(e: CkptsyncError, kind: str, subject: object, why: str) -> Finding:
    """Return an error as a failure of this kind, with the exit code `STORAGE` for a StoreError.

    A ``subject`` at the start of the message is cut off.
    """
    what, hint = str(e).removeprefix(f"{subject}: "), e.hint or "see the error message"
    code = STORAGE if isinstance(e, StoreError) else SETUP
    return fail(kind, subject, what, why=why, hint=hint, code=code)


def read_finding(raw: object, node: str) -> Finding | None:
    """Return the finding that a node published, as one of ``node``'s; None if ``raw`` is none.

    Texts are cut at `_LONGEST` characters.
    """
    if not isinstance(raw, dict):
        return None
    kind, level, code = raw.get("kind"), raw.get("level"), raw.get("exit_code")
    texts = [raw.get(key) for key in ("subject", "what", "why", "hint")]
    if level not in ("fail", "warn") or code not in (SETUP, STORAGE):
        return None
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        return None
    if not all(isinstance(text, str) for text in texts):
        return None
    subject, what, why, hint = (str(text)[:_LONGEST] for text in texts)
    return Finding(level, kind, (node,), subject, what, why, hint, code)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return each finding once, failures first, then by kind, nodes, subject and text."""
    return tuple(sorted(set(findings), key=lambda f: (f.level, f.kind, f.nodes, f.subject, f.what)))


def exit_code(findings: Iterable[Finding]) -> int:
    """Return the greatest exit code of the failures; 0 if there are only warnings."""
    return max((f.exit_code for f in findings if f.level == "fail"), default=0)
