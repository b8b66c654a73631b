"""What a worker has seen and done, as values for commands, services and heartbeats.

Many readers want the same: tables, JSON, heartbeats, exit codes.  So a worker prints nothing, and
returns one `UploadProgress` for each save, and one `Failure` for each error: texts and numbers
only, which keep no exception and no open file alive.
"""

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
    """The progress of one save of a checkpoint on this node, or of one upload.

    ``phase``:
      ``waiting``     not finished, or not all of it could be sent yet
      ``not-final``   it lies where the final model will lie, and the training goes on
      ``sending``     it is being sent
      ``sent``        it was sent since the last plan
      ``stored``      the store had it before
      ``elsewhere``   another node sends it, or has
      ``retired``     given up in the store
      ``failed``      see the failure
      ``missed``      removed by the trainer before it was known to be complete
      ``lost``        removed before it was sent, or while it was sent
      ``superseded``  not sent, since a newer one was finished
      ``cleaned``     removed from this node; the store has it

    ``detail``: the reason, for people.  ``left_out``: files of the checkpoint that are not sent.
    ``added``: files from around the checkpoint that are sent with it.
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
    """An error as a value.

    ``checkpoint`` is empty if the error concerns the whole run.  ``may_pass``: the same call may
    succeed in a moment.
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
        """Return whether trying the same again cannot succeed."""
        return self.exit_code in _LASTING


@dataclass(frozen=True, slots=True)
class RepairedFile:
    """A damaged file that was sent again, or, with a ``reason``, could not be.

    ``name`` is as in the report.
    """

    run: str
    report: str
    name: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class WorkerResult:
    """What one plan saw and did.

    ``notes``: what an operator should see.  ``lacks``: by report, the files that it calls damaged,
    that this node named or had, and whose bytes are not here any more; also this node's damaged
    manifests of which it has no copy.
    """

    node: str
    progress: tuple[UploadProgress, ...] = ()
    repairs: tuple[RepairedFile, ...] = ()
    failures: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def queue(self) -> tuple[str, ...]:
        """Return ``run/checkpoint`` of each save that is to be uploaded.

        Those that are being sent come first.
        """
        waiting = [p for p in self.progress if p.phase in ON_THE_WAY]
        waiting.sort(key=lambda p: p.phase != "sending")
        return tuple(dict.fromkeys(f"{p.run}/{p.checkpoint}" for p in waiting))

    @property
    def errors(self) -> tuple[str, ...]:
        """Return the failures for a heartbeat, a line each."""
        return tuple(
            f"{f.run}/{f.checkpoint}: {f.text}" if f.checkpoint else f"{f.run}: {f.text}"
            for f in self.failures
        )


def describe_failure(run: str, checkpoint: str, error: CkptsyncError) -> Failure:
    """Return an error as a value; ``may_pass`` is set for a Transient."""
    return Failure(
        run,
        checkpoint,
        type(error).__name__,
        str(error),
        error.hint,
        error.exit_code,
        isinstance(error, Transient),
    )
