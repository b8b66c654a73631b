"""Summaries: what a catalogue holds of each location, without its listing. Pure.

A location's records and files can be megabytes; lists, alarms and a head's decisions need some
fifty values of it. `summarize` makes these values, so that a catalogue of 10,000 locations is small
and can be cached. What needs several locations of a run (`explain_missing`, `by_age`) is made of
summaries afterwards.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import accumulate
from typing import Literal

from ckptsync.checkpoint_dirs import family_of, series_and_step
from ckptsync.digest import digest
from ckptsync.layouts.file_names import join, rank
from ckptsync.records.event_record import EventRecord
from ckptsync.records.io import Fault
from ckptsync.records.location_status import (
    LocationState,
    Status,
    reading_order,
    unanswered_findings,
)
from ckptsync.records.manifest_groups import Sibling
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.report import DAMAGE, LEVELS, Level, Report, Verdict
from ckptsync.records.save_decisions import Tombstone, fate, keep_reason
from ckptsync.records.save_order import SaveDates, oldest_first
from ckptsync.records.store_paths import consolidated_prefix, file_name, parse_record_name
from ckptsync.records.weights_record import ModelValues, WeightsFinding, find_values
from ckptsync.safe_names import CONSOLIDATED
from ckptsync.stores.contract import Entry

TOKENIZER = "tokenizer"
SKEW = 10.0
"""Seconds by which two clocks may differ, and nobody need hear of it."""
LINES = 8
"""Lines of evidence and the like that are held; one more counts the others."""
MOST_DAMAGED = 100
_TOKENIZERS = (
    TOKENIZER,
    "vocab.",
    "spiece.",
    "sentencepiece.",
    "tekken.",
    "processor_config.",
    "preprocessor_config.",
)
Owner = tuple[str, str]
"""A node, and the location in which it had a rank."""


@dataclass(frozen=True, slots=True)
class Proven:
    """What the reports of a location prove, and when; see `records.location_status.proof`.

    Times are seconds on the store's clock, 0 if there is none.
    """

    report: str = ""
    """The report's name: the last unanswered DAMAGED one, else the last proof, else the newest."""
    verdict: Verdict | None = None
    """That of ``report``."""
    level: Level | None = None
    """That of ``report``."""
    when: float = 0.0
    """The mtime of ``report``."""
    holds: bool = False
    """A report at level digest or above found no damage in these manifests and this model record.

    And no DAMAGED report is unanswered.
    """
    passed: tuple[tuple[Level, float], ...] = ()
    """Each level at which a report found no damage, and when the last one did."""
    damage: tuple[str, ...] = ()
    """The names of the DAMAGED reports that no later report answers."""
    damage_level: Level | None = None
    """The level that an answer to all of ``damage`` must have."""
    damaged_at: float = 0.0
    """The mtime of the newest report of ``damage``."""
    rewritten_at: float = 0.0
    """The mtime, as it is now, of the newest file that a report of ``damage`` names."""
    first: float = 0.0
    """When a report first found no damage at level digest or above."""
    answered: str = ""
    """The name of the last DAMAGED report, if later ones answer all; else empty."""
    answered_at: float = 0.0
    """When the first report after ``answered`` was written."""


@dataclass(frozen=True, slots=True)
class Handled:
    """What was done about an event of a location, by one definition; see `EventRecord`.

    ``name``, ``event``, ``of`` and ``definition`` are those of its records. ``done``: some try
    succeeded. ``failures``: how many tries failed. ``error``: why the last try failed; empty if it
    did not. ``at``: the mtime of the last try's record.
    """

    name: str
    event: str
    of: str
    definition: str
    done: bool
    failures: int
    error: str
    at: float


@dataclass(frozen=True, slots=True)
class UnnamedFile:
    """A file that no record names: its name below the run, and its bytes (None if it is a link).

    ``runs``: it is code, a pickle, or a configuration that names code.
    """

    name: str
    size: int | None
    runs: bool

    def __str__(self) -> str:
        """Return what people are shown."""
        return f"{self.name} (may run code when somebody opens it)" if self.runs else self.name


@dataclass(frozen=True, slots=True)
class Gap:
    """Files that an incomplete location lacks.

    ``files``: how many. ``first``: the path of the first; empty if no path is known. ``rank``: the
    rank that their names say, -1 if they say none. ``node``: the node that sent them, empty if none
    did.
    """

    files: int
    first: str
    rank: int = -1
    node: str = ""


@dataclass(frozen=True, slots=True)
class DamagedFile:
    """A file or record that an unanswered report calls damaged.

    ``name``: as reports have it. ``of``: the consolidated ``model``, whose record counts as its
    file; a ``record``; or a ``file`` of the trainer's. ``nodes``: those whose it is.
    ``is_rewritten``: it was written again since.
    """

    name: str
    of: Literal["model", "record", "file"]
    nodes: tuple[str, ...] = ()
    is_rewritten: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """One location in short: the values of its `LocationState` that lists and decisions need.

    Times are in seconds on the store's clock, 0 if unknown. Lists of lines have at most `LINES`
    lines and one that counts the others (`cut`).
    """

    run: str
    checkpoint: str
    location: str
    step: int | None
    """The step in the checkpoint's name; None if it has none."""
    status: Status
    evidence: tuple[str, ...] = ()
    """Lines: why it has no better status. Of a DAMAGED one: the damage."""
    lacks: tuple[str, ...] = ()
    """Lines: what a training needs to resume from it, and what is not in the store."""

    # Its records. A manifest counts if its node has written none that replaces it.
    nodes: tuple[str, ...] = ()
    """The nodes that wrote the manifests that count."""
    manifests: tuple[str, ...] = ()
    """The names of the manifests that count."""
    model_record: str = ""
    """The name of the model record that counts; empty if there is none."""
    model_records: int = 0
    """How many model records there are."""
    reports: int = 0
    """How many reports there are."""
    tombstones: int = 0
    """How many tombstones there are."""
    state: str = ""
    """Changes whenever a record appears or goes that decides what is due (`_records_key`)."""

    # Its own files: those of the trainer, without the consolidated model.
    files: int = 0
    """How many paths the checkpoint's own files have."""
    size: int = 0
    """Bytes of its own files that are in the store, each path once."""
    ranks: tuple[tuple[str, str], ...] = ()
    """Each node with the ranks whose files it had, as ``0-3,7``; nodes without ranks are absent."""

    # When it was written and stored.
    ended: float = 0.0
    """The mtime of its newest file, corrected by the measured offset of its node's clock.

    It is never later than the arrival of the file's manifest.
    """
    first_arrival: float = 0.0
    """When its first manifest was in the store.

    A repair can write a manifest again; then the mtime of the oldest record that names it counts.
    """
    arrived: float = 0.0
    """The mtime of the newest manifest that counts."""
    ahead: float = 0.0
    """Seconds by which its files are dated later than their manifests arrived; else 0."""

    # What it can be used for, and what reports prove.
    model: bool = False
    """A model can be made of it."""
    resume: bool = False
    """A training can resume from it."""
    consolidated: bool = False
    """It has a consolidated model with all files of its model record."""
    proof: Proven = Proven()
    suspects: tuple[str, ...] = ()
    """Paths of the model's files that are missing, or that an unanswered report calls damaged."""
    damaged: tuple[DamagedFile, ...] = ()
    """What unanswered reports call damaged, where it is DAMAGED; at most `MOST_DAMAGED`."""

    # Its consolidated model.
    model_files: int = 0
    """How many files the consolidated model has."""
    model_size: int = 0
    """Bytes of the consolidated model's files."""
    merged: float = 0.0
    """The mtime of the model record; 0 if there is none."""
    late: bool = False
    """Manifests count that the model record does not name: they came after the merge."""
    to_open: tuple[str, ...] = ()
    """What the model lacks to be opened: its configuration's file name, `TOKENIZER`, or both."""
    weights: ModelValues | None = None
    """The values of the model by group of layers; None where no head counted them."""
    left_out: tuple[str, ...] = ()
    """Lines: code of the checkpoint that the consolidated model does not have."""

    # Whether it is deleted, or kept.
    retired: str = ""
    """The reason of the tombstone for all of it; empty if there is none in force."""
    shards_retired: str = ""
    """The reason of the tombstone for its own files alone, where the model stays; else empty."""
    mark: str = ""
    """The name of the first tombstone in force for all of it; empty if there is none."""
    marked_at: float = 0.0
    """The mtime of the newest tombstone in force; 0 if there is none."""
    withdrawn_at: float = 0.0
    """The mtime of the newest tombstone that withdraws one; 0 if there is none."""
    begun: bool = False
    """A head has begun to delete: files may be gone already."""
    shards_deleted: bool = False
    """A head has deleted all of its own files."""
    kept: str = ""
    """Why a person keeps it; empty if nobody does."""

    # What is missing of an incomplete location, or on its way.
    gaps: tuple[Gap, ...] = ()
    """The missing files, counted by rank or by node; empty where it is not incomplete."""
    missing_lines: tuple[str, ...] = ()
    """Lines: the missing files of an incomplete one, and the nodes that should have them.

    `explain_missing` sets it, from ``gaps`` and the run's other checkpoints; otherwise empty.
    """
    awaited_nodes: tuple[str, ...] = ()
    """The nodes that should have the missing files, sorted; set with ``missing_lines``."""
    siblings: tuple[Sibling, ...] = ()
    """Other locations that have, or may have, parts of the same save."""
    unknown: bool = False
    """It is incomplete, and no file is of a layout that is merged: so no node has to send more."""
    doubts: tuple[str, ...] = ()
    """Lines: why its model lacks, or may lack, tensors although no file is known to be missing."""
    uploading: tuple[str, ...] = ()
    """The nodes that are sending its files now, where it is UPLOADING."""
    demanded: int = 0
    """Bytes of the files that its model needs, until it is complete; 0 if a size is unknown."""
    present: int = 0
    """Those of the ``demanded`` bytes that are in the store."""
    whole: int = 0
    """Bytes that it will have when all is uploaded; 0 if no node says so."""

    # Files that no record names.
    unnamed: tuple[str, ...] = ()
    """The first files beside its own that no record names, as people are shown them."""
    unnamed_files: int = 0
    """How many files no record names; 0 also where nobody looked."""
    unnamed_runs: bool = False
    """One of the files that no record names may run code."""
    named: str = ""
    """`names_key` of all files that its records name."""

    # Events.
    handled: tuple[Handled, ...] = ()
    """What was done about its events."""
    metrics: tuple[tuple[str, float], ...] = ()
    """What events measured: the last value of each metric, by name."""

    @property
    def unnamed_line(self) -> str:
        """Return how many files no record names, with the first few; empty if there are none."""
        if not self.unnamed:
            return ""
        more = ", …" if self.unnamed_files > len(self.unnamed) else ""
        noun = "file" if self.unnamed_files == 1 else "files"
        names = ", ".join(self.unnamed)
        return f"{self.unnamed_files} {noun} that no record names: {names}{more}"

    @property
    def weights_findings(self) -> tuple[WeightsFinding, ...]:
        """Return what looks wrong in the weights of the model; empty if nobody compared them."""
        return self.weights.findings if self.weights else ()

    @property
    def dates(self) -> SaveDates:
        """Return the dates by which `by_age` orders this location."""
        return SaveDates(self.checkpoint, self.ended, self.first_arrival, self.ahead > SKEW)

    @property
    def percent(self) -> int | None:
        """Return the stored share of a model's bytes, 0 to 100, rounded down.

        None unless a node is uploading and the size is known.
        """
        return 100 * self.present // self.demanded if self.uploading and self.demanded else None

    @property
    def unopenable(self) -> str:
        """Return why nothing opens the consolidated model; empty if it has its configuration."""
        config = next((name for name in self.to_open if name != TOKENIZER), "")
        opener = "PeftModel" if config == "adapter_config.json" else "from_pretrained"
        return f"no {config}: {opener} cannot open it" if config else ""

    @property
    def supply_hint(self) -> str:
        """Return how to supply what the consolidated model lacks; empty if it lacks nothing.

        An adapter's missing tokenizer is not mentioned beside its configuration.
        """
        if not self.to_open:
            return ""
        is_adapter = "adapter_config.json" in self.to_open  # its base model has a tokenizer
        lacking = [name for name in self.to_open if name != TOKENIZER or not is_adapter]
        names = " and ".join("its tokenizer" if name == TOKENIZER else name for name in lacking)
        return (
            f"put {names} into the output directory of {self.run}, where its worker (or `ckptsync"
            f" push`) finds it, or set head.config_from.{self.run} to a directory that has it, and"
            " reload the head (`ckptsync help head`)"
        )


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The summaries of a store or run.

    ``summaries`` are by run and step; ``faults`` by name; ``clock``: the newest mtime in the store.
    ``begun``: checkpoints that nodes upload and that have no manifest yet. People are shown them;
    nothing is decided about them.
    """

    summaries: tuple[Summary, ...] = ()
    faults: tuple[Fault, ...] = ()
    clock: float = 0.0
    begun: tuple[Summary, ...] = ()

    @property
    def shown(self) -> tuple[Summary, ...]:
        """Return ``summaries`` and ``begun`` together, by run and step."""
        if not self.begun:
            return self.summaries
        return tuple(
            sorted((*self.summaries, *self.begun), key=lambda s: reading_order(s.run, s.location))
        )


def summarize(state: LocationState, mtimes: Mapping[str, float]) -> Summary:
    """Return the summary of a location.

    ``mtimes``: store name → seconds on the store's clock; a missing one counts as 0. What `Summary`
    says that others set (``missing_lines``, ``uploading``, ``unnamed``) is left empty.
    """
    conditions, records, model = state.conditions, state.records, state.model_record
    manifest_names = {k.name for k in state.manifests}
    arrivals = _find_arrivals(state, mtimes)
    written_at = [(k.manifest.ended - k.manifest.clock_offset) / 1e9 for k in state.manifests]
    seconds_ahead = [  # by which files are dated later than their manifest arrived
        time - arrivals[k.name] if arrivals[k.name] else 0.0
        for k, time in zip(state.manifests, written_at, strict=True)
    ]
    decision = fate(records.tombstones, manifest_names)
    withdrawn = [name for name, stone in records.tombstones.items() if stone.stage == "withdrawn"]
    ranks: dict[str, set[int]] = {}
    for stored in state.manifests:
        ranks.setdefault(stored.manifest.node, set()).update(stored.manifest.ranks)
    reported_names = {
        f"{state.run}/{finding.name}"
        for name in conditions.proof.damage
        for finding in records.reports[name].findings
        if finding.kind in DAMAGE
    }
    prefix = consolidated_prefix(state.run, state.location)
    model_files = {prefix + f.path: f for f in model.files} if model else {}
    damage = _list_damage(state, mtimes) if state.status == "DAMAGED" else {}
    demanded, present = _count_demanded(state) if state.status == "INCOMPLETE" else (0, 0)
    suspects = [
        f.path
        for name, f in model_files.items()
        if state.sizes.get(name) != f.size or name in reported_names
    ]
    return Summary(
        run=state.run,
        checkpoint=state.checkpoint,
        location=state.location,
        step=series_and_step(state.checkpoint)[1],
        status=state.status,
        evidence=cut(tuple(damage) if state.status == "DAMAGED" else state.evidence),
        lacks=cut(conditions.resume.evidence),
        # its records
        nodes=tuple(sorted(ranks)),
        manifests=tuple(k.name for k in state.manifests),
        model_record=state.model_record_name,
        model_records=len(records.model_records),
        reports=len(records.reports),
        tombstones=len(records.tombstones),
        state=_records_key(state),
        # its own files
        files=len(state.files),
        size=sum(size for _, size in state.present().values()),
        ranks=tuple(
            (node, show_ranks(own_ranks)) for node, own_ranks in sorted(ranks.items()) if own_ranks
        ),
        # when it was written and stored
        ended=max(
            time - max(0.0, seconds)
            for time, seconds in zip(written_at, seconds_ahead, strict=True)
        ),
        first_arrival=min(arrivals.values()),
        arrived=max(mtimes.get(name, 0.0) for name in manifest_names),
        ahead=max(0.0, *seconds_ahead),
        # what it can be used for, and what reports prove
        model=conditions.model.holds,
        resume=conditions.resume.holds,
        consolidated=conditions.consolidated.holds,
        proof=_summarize_proof(state, mtimes, reported_names),
        suspects=tuple(sorted(suspects)),
        damaged=tuple(dict.fromkeys(damage.values()))[:MOST_DAMAGED],
        # its consolidated model
        model_files=len(model_files),
        model_size=sum(f.size for f in model_files.values()),
        merged=mtimes.get(state.model_record_name, 0.0) if model else 0.0,
        late=bool(model) and not manifest_names.issubset(model.manifests if model else ()),
        to_open=_lacks_to_open(model) if model else (),
        weights=find_values(model.tensors, records.weights) if model else None,
        left_out=cut(model.left_out) if model else (),
        # whether it is deleted, or kept
        retired=conditions.retired,
        shards_retired=decision.shards,
        mark=_lowest_numbered(records.tombstones, decision.stones) if decision.retired else "",
        marked_at=max((mtimes.get(name, 0.0) for name in decision.stones), default=0.0),
        withdrawn_at=max((mtimes.get(name, 0.0) for name in withdrawn), default=0.0),
        begun=decision.is_begun,
        shards_deleted=decision.is_done,
        kept=keep_reason(records.keeps),
        # what is missing of an incomplete location, or on its way
        gaps=find_gaps(state) if state.status == "INCOMPLETE" else (),
        siblings=tuple(replace(s, against=cut(s.against)) for s in state.siblings),
        unknown=state.status == "INCOMPLETE" and state.is_unknown,
        doubts=() if conditions.shards else cut(state.demands.remarks),
        demanded=demanded,
        present=present,
        # files that no record names
        named=names_key(state.named_files()),
        # events
        handled=_collect_handled(records.events, mtimes),
        metrics=_collect_metrics(records.events),
    )


def _records_key(state: LocationState) -> str:
    """Return a digest of the names of the records that decide what is due.

    They are the manifests that count, model records, reports, tombstones, keeps and weights
    records; events and joins are not among them.
    """
    records = state.records
    names = [stored.name for stored in state.manifests]
    names += [*records.model_records, *records.reports, *records.tombstones]
    names += [*records.keeps, *records.weights]
    return names_key(names)


def _lowest_numbered(records: Mapping[str, Tombstone], names: Iterable[str]) -> str:
    """Return the name of the record with the lowest number, on a tie the first; "" for none."""
    return min(names, key=lambda name: (records[name].n, name), default="")


def _collect_handled(
    records: Mapping[str, EventRecord], mtimes: Mapping[str, float]
) -> tuple[Handled, ...]:
    """Return what was done about events, one value for each event and definition.

    The error and time are those of the try with the highest number. They come by their first tries.
    """
    tries: dict[tuple[str, str, str, str], list[tuple[EventRecord, float]]] = {}
    for name, record in sorted(records.items(), key=lambda item: (item[1].n, item[0])):
        key = record.name, record.event, record.of, record.definition
        tries.setdefault(key, []).append((record, mtimes.get(name, 0.0)))
    return tuple(
        Handled(
            *key,
            done=any(record.outcome == "done" for record, _ in records_of_event),
            failures=sum(record.outcome == "failed" for record, _ in records_of_event),
            error=records_of_event[-1][0].error,
            at=records_of_event[-1][1],
        )
        for key, records_of_event in tries.items()
    )


def _collect_metrics(records: Mapping[str, EventRecord]) -> tuple[tuple[str, float], ...]:
    """Return each metric that events measured, by name, with its last value."""
    metrics: dict[str, float] = {}
    for _, record in sorted(records.items(), key=lambda item: (item[1].n, item[0])):
        metrics |= record.metrics
    return tuple(sorted(metrics.items()))


def names_key(names: Iterable[str]) -> str:
    """Return 16 hex digits of the digest of names in any order; of no names, too."""
    return digest("\n".join(sorted(names)).encode())[:16]


def summarize_begun(
    run: str, checkpoint: str, nodes: Mapping[str, float], entries: Iterable[Entry]
) -> Summary:
    """Return an UPLOADING summary of a checkpoint that nodes upload and that has no manifest yet.

    ``nodes``: id → seconds when that node last announced its upload. ``entries``: the files that
    are in the store already; not both are empty. All its times are that of the newest file or
    announcement.
    """
    files = list(entries)
    last = max([*nodes.values(), *(e.mtime for e in files)])
    return Summary(
        run=run,
        checkpoint=checkpoint,
        location=checkpoint,
        step=series_and_step(checkpoint)[1],
        status="UPLOADING",
        evidence=("no node has stored its part yet",),
        files=len(files),
        size=sum(e.size for e in files),
        ended=last,
        first_arrival=last,
        arrived=last,
        uploading=tuple(sorted(nodes)),
    )


def _count_demanded(state: LocationState) -> tuple[int, int]:
    """Return the bytes that a location's model needs, and how many of those are stored.

    Both are 0 if a size is unknown. A stored file counts up to its expected size.
    """
    demanded = present = 0
    for path, size in state.demands.model.items():
        copies = state.files.get(path)
        expected = copies[0].entry.size if copies else size
        if expected is None:
            return 0, 0
        name = copies[0].name if copies else file_name(state.run, state.location, path)
        demanded += expected
        present += min(expected, state.sizes.get(name, 0))
    return demanded, present


def find_gaps(state: LocationState) -> tuple[Gap, ...]:
    """Return what a location lacks: files that no node sent, by rank; then vanished files, by node.

    Vanished files are not listed in the size that a manifest says. A demanded file that a sibling
    has is not missing. If any rank is known, each other rank below the world size has a gap too, of
    0 files if no metadata names its files.
    """
    sibling_paths = {path for sibling in state.siblings.values() for path in sibling}
    demanded = {**state.demands.resume, **state.demands.model}.keys()
    absent: dict[int, list[str]] = {}  # rank → paths; -1: of no rank
    for path in sorted(demanded - state.files.keys() - sibling_paths):
        number = rank(path)
        absent.setdefault(-1 if number is None else number, []).append(path)
    ranks_present = {number for stored in state.manifests for number in stored.manifest.ranks}
    ranks_present |= {number for path in sibling_paths if (number := rank(path)) is not None}
    if ranks_present:  # ranks of this training of which no file has come
        for number in set(range(state.demands.world or 0)) - ranks_present:
            absent.setdefault(number, [])
    vanished: dict[str, list[str]] = {}  # node → paths
    for path, copies in state.files.items():
        if state.sizes.get(copies[0].name) != copies[0].entry.size:
            vanished.setdefault(copies[0].nodes[0], []).append(path)
    return (
        *(
            Gap(len(paths), paths[0] if paths else "", number)
            for number, paths in sorted(absent.items())
        ),
        *(Gap(len(paths), min(paths), -1, node) for node, paths in sorted(vanished.items())),
    )


def last_models(summaries: Iterable[Summary]) -> frozenset[str]:
    """Return the locations of a run that hold the training's last model, no step to resume from.

    They are those of family `final`; also `deepspeed` tags, from which the last model was made, if
    the run has checkpoints of the Trainer or of Accelerate.
    """
    families = {s.location: family_of(s.checkpoint) for s in summaries}
    has_tags = {"trainer", "accelerate"} & set(families.values())
    last = {"final", "deepspeed"} if has_tags else {"final"}
    return frozenset(location for location, family in families.items() if family in last)


def by_age(locations: Iterable[Summary]) -> tuple[Summary, ...]:
    """Return the locations of a run, the oldest first by `oldest_first` of their dates."""
    return oldest_first(locations, lambda s: s.dates)


def times_written(ordered: Sequence[Summary]) -> dict[str, float]:
    """Return location → when it was written (``ended``), or when an older one was if that is later.

    ``ordered``: locations of a run, the oldest first.
    """
    times = accumulate((s.ended for s in ordered), max)
    return dict(zip((s.location for s in ordered), times, strict=True))


def cut(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the first `LINES` lines, and if there are more, one that counts the others."""
    more = len(lines) - LINES
    return tuple(lines) if more <= 0 else (*lines[:LINES], f"and {more} more")


def show_ranks(ranks: Iterable[int]) -> str:
    """Return distinct ranks, in any order, as ``0-3,7``; empty for none."""
    spans: list[list[int]] = []
    for number in sorted(ranks):
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)


def read_ranks(text: str) -> set[int]:
    """Return the ranks that `show_ranks` wrote."""
    pairs = ([int(n) for n in part.split("-")] for part in text.split(",") if part)
    return {number for pair in pairs for number in range(pair[0], pair[-1] + 1)}


_AGAIN = {"model": "made again", "record": "written again", "file": "uploaded again"}


def _list_damage(state: LocationState, mtimes: Mapping[str, float]) -> dict[str, DamagedFile]:
    """Return a line for each damage in unanswered reports → its file; other findings are left out.

    Files written after the newest of these reports, which are not verified yet, come last.
    ``mtimes``: store name → seconds on the store's clock.
    """
    reported = max((mtimes.get(name, 0.0) for name in state.conditions.proof.damage), default=0.0)
    owners = {copy.name: copy.nodes for copies in state.files.values() for copy in copies}
    open_damage, rewritten = {}, {}
    for finding in (f for f in unanswered_findings(state) if f.kind in DAMAGE):
        name = f"{state.run}/{finding.name}"
        kind, nodes = damaged_part(finding.name), owners.get(name, ())
        if kind == "record" and (record := parse_record_name(name)):
            nodes = (record.node,)
        file = DamagedFile(finding.name, kind, nodes, mtimes.get(name, 0.0) > reported)
        if file.is_rewritten:
            rewritten[f"{finding.name}: {_AGAIN[kind]}, not yet verified"] = file
        else:
            open_damage[f"{finding.name}: {finding.kind}: {finding.detail}"] = file
    return open_damage | rewritten


def damaged_part(name: str) -> Literal["model", "record", "file"]:
    """Return what a damaged file is a part of; ``name`` is relative to the run.

    A model record counts as `model`.
    """
    record = parse_record_name(f"run/{name}")
    if name.startswith(f"{CONSOLIDATED}/") or (record is not None and record.kind == "model"):
        return "model"
    return "record" if record is not None else "file"


_REPAIRED_BY = {
    "file": "a worker that still has the files uploads them again",
    "record": "the worker that wrote a manifest writes it again",
    "model": "a head makes consolidated files again from the shards",
}


def who_repairs(names: Iterable[str]) -> str:
    """Return who repairs damaged files without a command, for people; "" without names.

    ``names`` are relative to the run.
    """
    parts = {damaged_part(name) for name in names}
    return "; ".join(action for part, action in _REPAIRED_BY.items() if part in parts)


def _find_arrivals(state: LocationState, mtimes: Mapping[str, float]) -> dict[str, float]:
    """Return the name of each manifest that counts → when it was first in the store; 0 if unknown.

    It is the mtime of the manifest, or of the oldest model record or report that names it if that
    is older: a repair writes a manifest again.
    """
    arrivals = {k.name: mtimes.get(k.name, 0.0) for k in state.manifests}
    records: list[tuple[str, Sequence[str]]] = []
    records += [(name, record.manifests) for name, record in state.records.model_records.items()]
    records += [(name, report.manifests) for name, report in state.records.reports.items()]
    for record_name, manifests in records:
        for name in arrivals.keys() & set(manifests):
            arrivals[name] = min(arrivals[name], mtimes.get(record_name) or arrivals[name])
    return arrivals


def _summarize_proof(
    state: LocationState, mtimes: Mapping[str, float], reported_names: Iterable[str]
) -> Proven:
    """Return what the reports of a location prove, with the times of those reports.

    ``reported_names``: store names of the files that unanswered reports name.
    """
    proof, reports = state.conditions.proof, state.records.reports
    # a report proves nothing of a manifest that it does not name, unless its files are deleted
    required = set() if state.conditions.shards else {k.name for k in state.manifests}
    passed: dict[Level, float] = {}
    for name, report in reports.items():
        is_of_model = report.model_record == state.model_record_name
        if report.verdict == "ok" and is_of_model and required.issubset(report.manifests):
            passed[report.level] = max(passed.get(report.level, 0.0), mtimes.get(name, 0.0))
    damage_levels = [reports[name].level for name in proof.damage]
    proof_times = [
        mtimes.get(name, 0.0)
        for name, r in reports.items()
        if r.verdict == "ok" and r.model_record == state.model_record_name
        if r.level in LEVELS[1:] and required.issubset(r.manifests)
    ]
    answered, answered_at = ("", 0.0) if proof.damage else _find_answered(reports, mtimes)
    return Proven(
        report=proof.report,
        verdict=proof.verdict,
        level=proof.level,
        when=mtimes.get(proof.report, 0.0),
        holds=proof.holds,
        passed=tuple((level, passed[level]) for level in LEVELS if level in passed),
        damage=proof.damage,
        damage_level=max(damage_levels, key=LEVELS.index, default=None),
        damaged_at=max((mtimes.get(name, 0.0) for name in proof.damage), default=0.0),
        rewritten_at=max((mtimes.get(name, 0.0) for name in reported_names), default=0.0),
        first=min(proof_times, default=0.0),
        answered=answered,
        answered_at=answered_at,
    )


def _find_answered(reports: Mapping[str, Report], mtimes: Mapping[str, float]) -> tuple[str, float]:
    """Return the DAMAGED report of the highest number, and when the first later report was written.

    Called if all are answered; ("", 0) if no report says DAMAGED.
    """
    damaged = [(r.n, name) for name, r in reports.items() if r.verdict == "damaged"]
    if not damaged:
        return "", 0.0
    number, last = max(damaged)
    later = (mtimes.get(n, 0.0) for n, r in reports.items() if r.n > number)
    return last, min(later, default=0.0)


def _lacks_to_open(model_record: ModelRecord) -> tuple[str, ...]:
    """Return what a model lacks: its configuration's file name, `TOKENIZER`, both, or ().

    Each adapter needs its own ``adapter_config.json``; any one tokenizer or processor is enough.
    """
    names = {f.path for f in model_record.files}
    config = "adapter_config.json" if model_record.adapters else "config.json"
    has_config = all(join(folder, config) in names for folder in model_record.adapters or ("",))
    has_tokenizer = any(name.startswith(_TOKENIZERS) for name in names)
    lacking = ((config, has_config), (TOKENIZER, has_tokenizer))
    return tuple(name for name, has_kind in lacking if not has_kind)


def explain_missing(summaries: Sequence[Summary]) -> tuple[Summary, ...]:
    """Return the summaries; set ``missing_lines`` and ``awaited_nodes`` in the INCOMPLETE ones.

    The node that had a rank in the run's checkpoint nearest in time should have its missing files.
    """
    runs: dict[str, list[Summary]] = {}
    if incomplete := {summary.run for summary in summaries if summary.status == "INCOMPLETE"}:
        of_runs = (summary for summary in summaries if summary.run in incomplete)
        for summary in sorted(of_runs, key=lambda summary: summary.arrived):
            runs.setdefault(summary.run, []).append(summary)
    return tuple(
        _explain_lost(summary, runs[summary.run]) if summary.status == "INCOMPLETE" else summary
        for summary in summaries
    )


def _explain_lost(summary: Summary, run: Sequence[Summary]) -> Summary:
    """Return an incomplete location's summary with ``missing_lines`` and ``awaited_nodes``.

    Missing files of a rank are awaited from the node that had the rank in the nearest checkpoint;
    vanished files from the node that sent them. If no such owner is known, all nodes of the nearest
    checkpoint that have sent nothing are awaited, too. The summary itself is returned if only
    ``doubts`` keep it incomplete, or no layout is known. ``run``: the run's summaries by arrival.
    """
    if summary.doubts and summary.doubts == summary.evidence:
        return summary  # no node lacks a file
    if summary.unknown:
        return summary
    unsent = [gap for gap in summary.gaps if not gap.node]
    vanished = [gap for gap in summary.gaps if gap.node]
    owners = _find_owners({gap.rank for gap in unsent if gap.rank >= 0}, summary, run)
    by_owner: dict[Owner | None, list[Gap]] = {}
    for gap in unsent:
        by_owner.setdefault(owners.get(gap.rank), []).append(gap)
    awaited = {owner[0] for owner in by_owner if owner} | {gap.node for gap in vanished}
    lines = [_gap_line(owner, gaps) for owner, gaps in by_owner.items()]
    lines += [
        f"{gap.node}: uploaded {_gap_files([gap])}, which is no longer in the store"
        for gap in vanished
    ]
    if by_owner.keys() <= {None}:  # no owner: nodes of the nearest checkpoint that sent nothing
        nodes_with_parts = {
            *summary.nodes,
            *(node for sibling in summary.siblings for node in sibling.nodes),
        }
        if nearest := next(_iterate_nearest(summary, run), None):
            absent = [node for node, _ in nearest.ranks if node not in nodes_with_parts]
            awaited.update(absent)
            text = f"has uploaded no part of it yet, as it did of {nearest.location}"
            lines += [f"{node}: {text}" for node in absent]
    return replace(summary, missing_lines=cut(lines), awaited_nodes=tuple(sorted(awaited)))


def _find_owners(
    missing: Collection[int], summary: Summary, run: Sequence[Summary]
) -> Mapping[int, Owner]:
    """Return rank → who had it, by the checkpoint nearest in time that has it; others are left out.

    ``run``: see `_iterate_nearest`.
    """
    owners: dict[int, Owner] = {}
    for nearby in _iterate_nearest(summary, run):
        if owners.keys() >= set(missing):
            break
        for node, ranks in nearby.ranks:
            for number in read_ranks(ranks).intersection(missing):
                owners.setdefault(number, (node, nearby.location))
    return owners


def _iterate_nearest(summary: Summary, run: Sequence[Summary]) -> Iterator[Summary]:
    """Yield the other summaries that have ranks, the nearest in time first.

    ``run`` is ordered by arrival and includes ``summary``.
    """
    after = bisect_right(run, summary.arrived, key=lambda s: s.arrived)
    by_distance = merge(
        reversed(run[:after]), iter(run[after:]), key=lambda s: abs(s.arrived - summary.arrived)
    )
    return (s for s in by_distance if s.ranks and s is not summary)


def _gap_line(owner: Owner | None, gaps: Sequence[Gap]) -> str:
    """Return a line for people: which files are missing, and who should have them.

    Without an owner it begins with the ranks; without ranks, with the files.
    """
    numbers = sorted({g.rank for g in gaps if g.rank >= 0})
    ranks = f"rank{'' if len(numbers) == 1 else 's'} {show_ranks(numbers)}" if numbers else ""
    subject = f"{owner[0]}, which had {ranks} in {owner[1]}" if owner else ranks
    text = (
        f"{_gap_files(gaps)}, which no node has uploaded"
        if any(g.files for g in gaps)
        else "no node has uploaded any of its files"
    )
    return f"{subject}: {text}" if subject else text


def _gap_files(gaps: Sequence[Gap]) -> str:
    """Return the path of the first missing file, and how many more there are.

    At least one gap must have files; else this raises StopIteration.
    """
    count, first = sum(g.files for g in gaps), next(g.first for g in gaps if g.files)
    return first if count == 1 else f"{first} and {count - 1} more"
