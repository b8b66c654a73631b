"""Choose the save that all nodes of an attempt begin with, by what each of them could begin with.

Pure: the same records give the same save, for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ckptsync.catalogue.location_summary import Summary, by_age, last_models
from ckptsync.checkpoint_dirs import FINAL, series_and_step
from ckptsync.digest import digest
from ckptsync.errors import ConfigError
from ckptsync.records.save_order import SaveDates, oldest_first
from ckptsync.typed_json import Count, FormatNumber

FORMAT = 1
MOST = 1000
"""Saves that one node names: its newest."""
_COMPLETE = ("COMPLETE", "CONSOLIDATED", "VERIFIED")
_ONE_LAUNCH = (
    "give --nnodes alike on all nodes, and begin each start of the training under its own --attempt"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A save that a node could begin with.

    ``id`` is the same for the same save only: of one in the store, of its location and manifests;
    of one in the output directory (``location`` is empty), of its files' names, sizes and times.
    """

    checkpoint: str
    id: str
    location: str = ""

    @property
    def step(self) -> int | None:
        """Return the step in its checkpoint's name."""
        return series_and_step(self.checkpoint)[1]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """What one node could begin with, the oldest save first, when it joined an attempt.

    ``unverified``: the newest checkpoint that is complete and has not been verified, where only
    verified ones count and there is none; else empty.
    """

    node: str
    nnodes: Count
    candidates: tuple[Candidate, ...]
    unverified: str = ""
    format: FormatNumber = FORMAT


@dataclass(frozen=True, slots=True)
class WholeSave:
    """A save that is whole in the output directory.  ``written``: s on this machine's clock."""

    checkpoint: str
    id: str
    written: float


def save_id(location: str, manifests: Iterable[str]) -> str:
    """Return what identifies a save in a store: the names of manifests hold their digests."""
    return digest("\n".join([location, *sorted(manifests)]).encode())[:32]


def list_candidates(
    summaries: Sequence[Summary], local: Sequence[WholeSave], *, is_verified: bool
) -> tuple[Candidate, ...]:
    """Return what a node could begin with, the oldest save first.

    Of a run in the store: what is VERIFIED, or with ``is_verified`` false also what is complete,
    and has all that resuming needs; and what is whole in the output directory.
    """
    extra = last_models(summaries)
    saves: list[tuple[Candidate, SaveDates]] = [
        (Candidate(s.checkpoint, save_id(s.location, s.manifests), s.location), s.dates)
        for s in by_age(summaries)
        if s.status in (("VERIFIED",) if is_verified else _COMPLETE)
        and s.resume
        and not (s.shards_retired or s.location in extra)
    ]
    saves += [
        (Candidate(one.checkpoint, one.id), SaveDates(one.checkpoint, one.written, one.written))
        for one in local
        if one.checkpoint != FINAL
    ]
    ordered = oldest_first(saves, lambda one: one[1])
    return tuple(candidate for candidate, _ in ordered)[-MOST:]


def find_unverified(
    summaries: Sequence[Summary], local: Sequence[WholeSave], verified: Sequence[Candidate]
) -> str:
    """Return the checkpoint that `--trust complete` would begin with; empty if it is verified.

    ``verified``: what `list_candidates` gave.
    """
    candidates = list_candidates(summaries, local, is_verified=False)
    return candidates[-1].checkpoint if candidates and candidates[-1] not in verified else ""


def find_unresumable(summaries: Sequence[Summary]) -> str:
    """Return the run's newest complete checkpoint and what of it a training lacks; else empty."""
    complete = [s for s in by_age(summaries) if s.status in _COMPLETE]
    if not complete or complete[-1].resume:
        return ""
    newest = complete[-1]
    return f"{newest.checkpoint} is complete, but not for resuming: {'; '.join(newest.lacks[:2])}"


def check_nodes(records: Mapping[str, NodeRecord], nnodes: int) -> None:
    """Raise ConfigError where there are more nodes than expected, or nodes expect other numbers."""
    nodes = ", ".join(sorted(records))
    counts = {node: record.nnodes for node, record in records.items()}
    if set(counts.values()) - {nnodes}:
        each = "; ".join(f"{node} expects {count}" for node, count in sorted(counts.items()))
        raise ConfigError(
            f"the nodes of this attempt disagree on their number: {each}", hint=_ONE_LAUNCH
        )
    if len(records) > nnodes:
        raise ConfigError(
            f"{len(records)} nodes take part in an attempt of {nnodes}: {nodes}", hint=_ONE_LAUNCH
        )


def choose(records: Mapping[str, NodeRecord]) -> Candidate | None:
    """Return the newest save that all nodes could begin with; None if there is none.

    ``records``: of all nodes of an attempt.  Where nodes order saves otherwise, the order of the
    node whose name comes first counts.
    """
    ordered = [record for _, record in sorted(records.items())]
    common = set.intersection(*({one.id for one in record.candidates} for record in ordered))
    return next((one for one in reversed(ordered[0].candidates) if one.id in common), None)


def why_chosen(records: Mapping[str, NodeRecord], choice: Candidate | None) -> str:
    """Say what newer saves some nodes have, and others have not; empty if there are none."""
    newer: dict[str, list[str]] = {}
    for node, record in sorted(records.items()):
        ids = [one.id for one in record.candidates]
        after = ids.index(choice.id) + 1 if choice else 0
        for one in record.candidates[after:]:
            if choice is None or (one.step or 0) > (choice.step or 0):
                newer.setdefault(one.checkpoint, []).append(node)
    if not newer:
        return ""
    name, nodes = next(reversed(newer.items()))
    if records.keys() == {*nodes}:
        return f"{name} is newer, but the nodes do not have the same save of it"
    return f"{name} is newer, but only {', '.join(dict.fromkeys(nodes))} could begin with it"
