"""From what a user names to an order: the store is looked at, then the one place that is meant, afresh."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.catalogue.fresh import fresh_place
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Fault
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.pull.choosing import Trust, choose, split
from ckptsync.pull.wanted import Order, model, whole
from ckptsync.records.names import CONSOLIDATED, OURS
from ckptsync.records.state import Snapshot, Word
from ckptsync.stores import trees
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import directory_of, is_store, open_store
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located


@dataclass(frozen=True, slots=True)
class Asked:
    """``what``: ``RUN``, ``RUN/CHECKPOINT`` or ``RUN/latest``.  ``node``: only what it needs; ``is_model``: the consolidated model instead."""

    what: str
    trust: Trust = "verified"
    node: str = ""
    is_model: bool = False


@dataclass(frozen=True, slots=True)
class Ordered:
    """``place`` of ``run``, which is in ``word``, and what is wanted of it."""

    run: str
    place: str
    word: Word
    order: Order


def ordered(store: Store, asked: Asked) -> Ordered:
    """Raises ConfigError for what is not there, Incomplete and Corrupt for what has not all arrived or is damaged, StoreError."""
    what = asked.what.strip("/")
    found = read(store, run=what.rpartition("/")[0] or what)
    run, name = split(what, found.summaries)
    _check_readable(found.faults, run, name)
    choice = choose(found.summaries, run, name, asked.trust, "model" if asked.is_model else "node" if asked.node else "whole")
    place = choice.summary.place
    seen = fresh_place(store, run, place).of(run, place)
    if seen is None:
        raise Incomplete(f"{run}/{place}: it has just moved, or been let go", hint="try again")
    order = model(seen) if asked.is_model else whole(seen, asked.node)
    if order.lacking and (asked.trust != "any" or asked.is_model):
        raise _lacking(seen, order)
    return Ordered(run, place, seen.word, replace(order, notes=(*choice.notes, *order.notes)))


def retired(store: Store, run: str, place: str) -> str:
    """Why a place is being let go, if it is: asked once a file of it was not there."""
    seen = fresh_place(store, run, place).of(run, place)
    return seen.facets.retired if seen else "no manifest of it counts any more"


def inside(url: str, access: Access) -> tuple[Store, str]:
    """The store that a place lies in, and what of it is meant; raises ConfigError if it is in none."""
    place = located(url)
    if isinstance(place, Remote):
        above = trees.store_above(place, access)
        if above is not None:
            store = open_store(above.url, access.options_of(above), access.limits)
            return store, _named(trees.path(place).relative_to(trees.path(above)).parts)
    else:
        for root in (place, *place.parents):
            if is_store(str(root)):
                return open_store(str(root), limits=access.limits), _named(place.relative_to(root).parts)
    raise ConfigError(
        f"{url}: in no store", hint="name a run, and its store with --store, -c or CKPTSYNC_STORE; or the URL of a run in a store"
    )


def check_apart(store: Store, destination: Path) -> None:
    """Raises ConfigError for a destination in the store."""
    root = directory_of(store)
    if root is not None and destination.resolve().is_relative_to(Path(root).resolve()):
        raise ConfigError(
            f"{destination}: lies inside the store {root}", hint="name a directory elsewhere: a store is not for training in"
        )


def _named(parts: tuple[str, ...]) -> str:
    """A consolidated model, or a record, is found under its place's own name."""
    if not parts:
        raise ConfigError("a store, and no run in it, is named", hint="`ckptsync ls` shows what is there")
    return "/".join(part for part in parts if part not in (CONSOLIDATED, OURS))


def _check_readable(faults: tuple[Fault, ...], run: str, name: str) -> None:
    """Of a place with records that cannot be read nothing is said; whoever asks for it is told."""
    for fault in faults:
        if fault.run == run and fault.place == name and fault.record.kind in ("manifest", "tombstone"):
            raise fault.error


def _lacking(seen: Snapshot, order: Order) -> Incomplete | Corrupt:
    shown = "; ".join(order.lacking[:8]) + (f"; and {len(order.lacking) - 8} more" if len(order.lacking) > 8 else "")
    hint = "another checkpoint of the run may be whole (`ckptsync ls`); what is there of this one comes with --unverified"
    kind = Corrupt if seen.word == "DAMAGED" else Incomplete
    return kind(f"{seen.run}/{seen.place}: not all of it is in the store: {shown}", hint=hint)
