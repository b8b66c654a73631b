"""What a worker has seen and done, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckptsync.errors import CkptsyncError, ConfigError, Corrupt, Transient, Unsupported

Phase = Literal[
    "waiting",
    "not-final",
    "sending",
    "sent",
    "stored",
    "elsewhere",
    "retired",
    "failed",
    "missed",
    "lost",
    "superseded",
    "cleaned",
]
ON_THE_WAY: tuple[Phase, ...] = ("waiting", "sending", "failed")
_LASTING = frozenset(error.exit_code for error in (ConfigError, Corrupt, Unsupported))


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """One save of a checkpoint on this node.

    ``waiting``: not finished, or not all could be sent yet; ``not-final``: where the final model
    will lie, while the training goes on; ``sending``: on its way; ``sent``:
    since the last plan; ``stored``: before it; ``elsewhere``: another node sends it, or has;
    ``retired``: given up in the store; ``failed``: see the failure; ``missed``: removed by the
    trainer before it was known whole; ``lost``: removed by somebody before it was sent, or while it
    was; ``superseded``: not sent, since a newer one was finished; ``cleaned``: removed from this
    node, the store has it.  ``detail`` is in words, for people.  ``left_out``: what lies in the
    checkpoint and is not sent; ``added``: files found around it that are sent with it.
    """

    run: str
    checkpoint: str
    k: int
    phase: Phase
    detail: str
    location: str = ""
    files: int = 0
    size: int = 0
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    added: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """An error, as the operator needs it.

    ``checkpoint`` is empty where the whole run is concerned.  ``may_pass``: the same may succeed in
    a moment.
    """

    run: str
    checkpoint: str
    error: str
    text: str
    hint: str
    exit_code: int
    may_pass: bool = False

    @property
    def is_lasting(self) -> bool:
        """Whether no later try of the same mends it."""
        return self.exit_code in _LASTING


@dataclass(frozen=True, slots=True)
class RepairedFile:
    """A file that a report called damaged: sent again, or, with ``reason``, why not.

    ``name`` is as in the report.
    """

    run: str
    report: str
    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """All that one plan saw and did.

    ``notes``: what an operator should see.  ``lacks``: by report the files it
    names that this node named or had, and whose bytes are not here any more; and this node's
    damaged manifests of which it has no copy.
    """

    node: str
    progress: tuple[UploadProgress, ...] = ()
    repairs: tuple[RepairedFile, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def queue(self) -> tuple[str, ...]:
        """Return ``run/checkpoint`` of all that is on its way: what is sent goes first."""
        waiting = [p for p in self.progress if p.phase in ON_THE_WAY]
        waiting.sort(key=lambda p: p.phase != "sending")
        return tuple(dict.fromkeys(f"{p.run}/{p.checkpoint}" for p in waiting))

    @property
    def errors(self) -> tuple[str, ...]:
        """Return the failures, a line each, for a heartbeat."""
        return tuple(
            f"{f.run}/{f.checkpoint}: {f.text}" if f.checkpoint else f"{f.run}: {f.text}"
            for f in self.failures
        )


def describe_failure(run: str, checkpoint: str, error: CkptsyncError) -> Failure:
    """Return an error as a value."""
    return Failure(
        run,
        checkpoint,
        type(error).__name__,
        str(error),
        error.hint,
        error.exit_code,
        isinstance(error, Transient),
    )
