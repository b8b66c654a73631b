"""Choose the save that all nodes of an attempt begin with.

Each node has recorded which saves it could begin with.  The newest one that is in all records is
chosen.  Pure, so that every node computes the same choice from the same records, however often.
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
"""The number of saves that one node records at most: its newest ones."""
_COMPLETE = ("COMPLETE", "CONSOLIDATED", "VERIFIED")
_ONE_LAUNCH = (
    "give --nnodes alike on all nodes, and begin each start of the training under its own --attempt"
)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A save that a node could begin with.

    ``id`` identifies the save.  For a save in the store it is computed from its location and its
    manifests; for one in the output directory (``location`` is empty), from the names, sizes and
    times of its files.
    """

    checkpoint: str
    id: str
    location: str = ""

    @property
    def step(self) -> int | None:
        """Return the step in its checkpoint's name; None without one."""
        return series_and_step(self.checkpoint)[1]


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """The saves that one node could begin with when it joined an attempt, the oldest first.

    ``unverified``: the newest checkpoint that is complete but not verified, if only verified ones
    count and this node has none; else empty.
    """

    node: str
    nnodes: Count
    candidates: tuple[Candidate, ...]
    unverified: str = ""
    format: FormatNumber = FORMAT


@dataclass(frozen=True, slots=True)
class WholeSave:
    """A save that is whole in the output directory.

    ``written``: seconds since the epoch, on this machine's clock.
    """

    checkpoint: str
    id: str
    written: float


def save_id(location: str, manifests: Iterable[str]) -> str:
    """Return the id of a save in a store; names of manifests contain the manifests' digests."""
    return digest("\n".join([location, *sorted(manifests)]).encode())[:32]


def list_candidates(
    summaries: Sequence[Summary], local: Sequence[WholeSave], *, is_verified: bool
) -> tuple[Candidate, ...]:
    """Return the saves that a node could begin with, the oldest first, the last `MOST` of them.

    Args:
        summaries: the run's locations in the store.  A candidate has all that resuming needs, has
            its shards, and is no last model.
        local: the saves that are whole in the output directory; the final model is left out.
        is_verified: whether a location must be VERIFIED; else a complete one is enough.

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
        (Candidate(s.checkpoint, s.id), SaveDates(s.checkpoint, s.written, s.written))
        for s in local
        if s.checkpoint != FINAL
    ]
    ordered = oldest_first(saves, lambda save: save[1])
    return tuple(candidate for candidate, _ in ordered)[-MOST:]


def find_unverified(
    summaries: Sequence[Summary], local: Sequence[WholeSave], verified: Sequence[Candidate]
) -> str:
    """Return the checkpoint that `--trust complete` would choose; empty if it is in ``verified``.

    ``verified``: the result of `list_candidates` for VERIFIED saves.
    """
    candidates = list_candidates(summaries, local, is_verified=False)
    return candidates[-1].checkpoint if candidates and candidates[-1] not in verified else ""


def find_unresumable(summaries: Sequence[Summary]) -> str:
    """Return what resuming from the newest complete checkpoint lacks; empty if nothing."""
    complete = [s for s in by_age(summaries) if s.status in _COMPLETE]
    if not complete or complete[-1].resume:
        return ""
    newest = complete[-1]
    return f"{newest.checkpoint} is complete, but not for resuming: {'; '.join(newest.lacks[:2])}"


def check_nodes(records: Mapping[str, NodeRecord], nnodes: int) -> None:
    """Raise ConfigError if more than ``nnodes`` nodes joined, or a node expects another number."""
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

    ``records``: those of all nodes of an attempt.  If nodes order their saves differently, the
    order of the node whose name sorts first counts.
    """
    ordered = [record for _, record in sorted(records.items())]
    common = set.intersection(*({save.id for save in record.candidates} for record in ordered))
    return next((save for save in reversed(ordered[0].candidates) if save.id in common), None)


def why_chosen(records: Mapping[str, NodeRecord], choice: Candidate | None) -> str:
    """Return which newer save the nodes do not share, as a sentence; empty if there is none."""
    newer: dict[str, list[str]] = {}
    for node, record in sorted(records.items()):
        ids = [save.id for save in record.candidates]
        after = ids.index(choice.id) + 1 if choice else 0
        for save in record.candidates[after:]:
            if choice is None or (save.step or 0) > (choice.step or 0):
                newer.setdefault(save.checkpoint, []).append(node)
    if not newer:
        return ""
    name, nodes = next(reversed(newer.items()))
    if records.keys() == {*nodes}:
        return f"{name} is newer, but the nodes do not have the same save of it"
    return f"{name} is newer, but only {', '.join(dict.fromkeys(nodes))} could begin with it"
