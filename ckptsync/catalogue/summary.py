"""What a catalogue keeps of each location: no manifest, no listing, a few lines at most, so that ten thousand of them are small."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckptsync.errors import CkptsyncError, Corrupt
from ckptsync.records.names import RecordName
from ckptsync.records.report import Finding, Level, Verdict
from ckptsync.records.saves import Sibling
from ckptsync.records.state import Status
from ckptsync.records.vanished import Vanished

TOKENIZER = "tokenizer"
LINES = 8
"""Lines of evidence, of lost files and the like that are kept; one more says how many there are."""


@dataclass(frozen=True, slots=True)
class Proven:
    """The last report that counts (see `records.state.proof`).  Times: seconds on the store's clock.

    ``when``: the mtime of that report's record.  ``holds``: a report at level digest or above found no damage in these very manifests and this
    very model record.  ``passed``: each level at which a report said so, and when the last one did.  ``damage``: names of the DAMAGED reports that nobody
    has answered; then ``asked`` is the level that an answer must have, ``said`` the mtime of the newest of them, and ``changed`` that of the
    newest file that they complain of, as it lies in the store now (0 if none is there).
    """

    report: str = ""
    verdict: Verdict | None = None
    level: Level | None = None
    when: float = 0.0
    holds: bool = False
    passed: tuple[tuple[Level, float], ...] = ()
    damage: tuple[str, ...] = ()
    asked: Level | None = None
    said: float = 0.0
    changed: float = 0.0


@dataclass(frozen=True, slots=True)
class Gap:
    """Files of an ARRIVING location that are not there: how many, and the first of them (empty where only a rank is known to be missing).

    ``rank``: whose they are by their names, -1 where those do not say.  ``node``: who has said that it sent them, else empty.
    """

    files: int
    first: str
    rank: int = -1
    node: str = ""


@dataclass(frozen=True, slots=True)
class Summary:
    """One location, as `records.state.Snapshot` has it, in short.

    ``step``: the number that its checkpoint's name ends in.  ``evidence``: why it is no better than its ``status``; ``lacks``: what resuming a
    training needs and is not there; both at most `LINES` lines and one that counts the others.  ``nodes``: whose manifests count; ``manifests``:
    their names.  ``model_record``: the name of the one that counts.  ``model_records``, ``reports``, ``tombstones``: how many records there are.

    ``files`` and ``size`` (bytes): the checkpoint's own, each once; of a location that is not finished, those that are there.  ``model_files``,
    ``model_size``: the consolidated model's, as consolidated.  ``ended``: seconds on the store's clock, the newest file's mtime, corrected by what its
    node measured; ``arrived``: the mtime of the newest manifest that counts, ``first`` of the oldest.

    ``retired``: a tombstone's reason, else empty; ``let_go``: the same where only the trainer's own files go.  ``said``: the mtime of the newest
    tombstone in force, ``back`` of the newest that took one back; ``begun``: files may be gone already, ``done``: no shard is left.  ``kept``: why a
    person keeps it, else empty.
    ``ranks``: node → those whose files it had, as ``0-3,7``; ``gaps``: what is missing of an ARRIVING location; ``lost``: the same as lines for people,
    with the nodes that should have it, as far as the run's other checkpoints tell; ``awaited``: those nodes.
    ``state``: changes with any record that is written or taken away; equal states fail equally.  ``late``: manifests count that the model record does not
    name; ``to_open``: what the consolidated model lacks to be opened, ``config.json`` (or ``adapter_config.json``) and ``tokenizer``;
    ``left_out``: code of the checkpoint that it does not have.
    ``siblings``: other locations with parts of this save, or of what may be this save.
    """

    run: str
    checkpoint: str
    location: str
    step: int | None
    status: Status
    evidence: tuple[str, ...]
    lacks: tuple[str, ...]
    nodes: tuple[str, ...]
    manifests: tuple[str, ...]
    model_record: str
    model_records: int
    reports: int
    tombstones: int
    files: int
    size: int
    model_files: int
    model_size: int
    ended: float
    first: float
    arrived: float
    model: bool
    resume: bool
    consolidated: bool
    proof: Proven
    retired: str = ""
    lost: tuple[str, ...] = ()
    state: str = ""
    let_go: str = ""
    kept: str = ""
    said: float = 0.0
    back: float = 0.0
    begun: bool = False
    done: bool = False
    late: bool = False
    to_open: tuple[str, ...] = ()
    ranks: tuple[tuple[str, str], ...] = ()
    gaps: tuple[Gap, ...] = ()
    awaited: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    siblings: tuple[Sibling, ...] = ()

    @property
    def unopenable(self) -> str:
        """Say why nothing opens the consolidated model; empty if it has its configuration."""
        config = next((name for name in self.to_open if name != TOKENIZER), "")
        opener = "PeftModel" if config == "adapter_config.json" else "from_pretrained"
        return f"no {config}: {opener} cannot open it" if config else ""

    @property
    def to_give(self) -> str:
        """Say how to give what the consolidated model lacks; empty if it lacks nothing."""
        if not self.to_open:
            return ""
        is_adapter = "adapter_config.json" in self.to_open  # its base model has a tokenizer
        names = " and ".join("its tokenizer" if n == TOKENIZER else n for n in self.to_open if n != TOKENIZER or not is_adapter)
        return (
            f"put {names} into the output directory of {self.run}, where its worker (or `ckptsync push`) finds it, or set"
            f" head.config_from.{self.run} to a directory that has it, and reload the head (`ckptsync help head`)"
        )


@dataclass(frozen=True, slots=True)
class Fault:
    """A record that cannot be read.  A damaged model record or report hides nothing: its location is then only not consolidated, or not verified."""

    name: str
    record: RecordName
    error: CkptsyncError

    @property
    def run(self) -> str:
        """Of the location that it is about."""
        return self.record.run

    @property
    def location(self) -> str:
        """As its name says."""
        return self.record.location

    @property
    def finding(self) -> Finding:
        """Damage, except to a report, which the next one replaces, and what is only newer than this program."""
        if isinstance(self.error, Vanished):
            return Finding("missing", self.name.removeprefix(f"{self.record.run}/"), str(self.error))
        is_damage = isinstance(self.error, Corrupt) and self.record.kind != "report"
        return Finding("digest" if is_damage else "note", self.name.removeprefix(f"{self.record.run}/"), str(self.error))


@dataclass(frozen=True, slots=True)
class Catalogue:
    """``summaries`` by run and step; ``faults`` in the order of their names; ``clock``: the newest mtime that was seen, seconds of the store's clock."""

    summaries: tuple[Summary, ...] = ()
    faults: tuple[Fault, ...] = field(default=())
    clock: float = 0.0
