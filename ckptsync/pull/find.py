"""Find in a store the checkpoint that a user names, and plan what to download of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.catalogue.fresh import fresh_location
from ckptsync.catalogue.reading import read
from ckptsync.catalogue.summary import Fault
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.pull.choose import Part, Trust, choose, split
from ckptsync.pull.plan import Plan, plan_checkpoint, plan_model
from ckptsync.records.names import CONSOLIDATED, OURS
from ckptsync.records.state import Snapshot, Status
from ckptsync.stores import trees
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import directory_of, is_store, open_store
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located


@dataclass(frozen=True, slots=True)
class Request:
    """What a user wants: ``what`` is ``RUN``, ``RUN/CHECKPOINT`` or ``RUN/latest``.

    ``node``: only the files that this node needs to resume.  ``is_model``: the consolidated model instead of the checkpoint.
    """

    what: str
    trust: Trust = "verified"
    node: str = ""
    is_model: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint in the store, its status, and the plan of its download."""

    run: str
    location: str
    status: Status
    plan: Plan


def find(store: Store, request: Request) -> Found:
    """Find what is requested, reading the chosen checkpoint's records afresh.

    Raises ConfigError if it does not exist, Incomplete or Corrupt if it is not whole, StoreError.
    """
    what = request.what.strip("/")
    catalogue = read(store, run=what.rpartition("/")[0] or what)
    run, name = split(what, catalogue.summaries)
    _check_readable(catalogue.faults, run, name)
    part: Part = "model" if request.is_model else "node" if request.node else "whole"
    choice = choose(catalogue.summaries, run, name, request.trust, part)
    location = choice.summary.location
    seen = fresh_location(store, run, location).of(run, location)
    if seen is None:
        raise Incomplete(f"{run}/{location}: it was moved or deleted a moment ago", hint="try again")
    plan = plan_model(seen) if request.is_model else plan_checkpoint(seen, request.node)
    if plan.missing and (request.trust != "any" or request.is_model):
        raise _missing(seen, plan)
    lacking = choice.summary.unopenable if request.is_model else ""
    told = (f"{lacking}; copy it there from the model that was trained, or {choice.summary.to_give}",) if lacking else ()
    return Found(run, location, seen.status, replace(plan, notes=(*choice.notes, *plan.notes, *told)))


def why_retired(store: Store, run: str, location: str) -> str:
    """Return why a checkpoint is being deleted, or an empty string if it is not.  For a file that vanished during a download."""
    seen = fresh_location(store, run, location).of(run, location)
    return seen.conditions.retired if seen else "no manifest of it counts any more"


def split_url(url: str, access: Access) -> tuple[Store, str]:
    """Return the store that a URL or path lies in, and the run (and checkpoint) in it.  Raises ConfigError if it lies in no store."""
    location = located(url)
    if isinstance(location, Remote):
        above = trees.store_above(location, access)
        if above is not None:
            store = open_store(above.url, access.options_of(above), access.limits)
            return store, _run_and_checkpoint(trees.path(location).relative_to(trees.path(above)).parts)
    else:
        for root in (location, *location.parents):
            if is_store(str(root)):
                return open_store(str(root), limits=access.limits), _run_and_checkpoint(location.relative_to(root).parts)
    raise ConfigError(
        f"{url}: not inside a store",
        hint="name a run, and its store with --store, -c or CKPTSYNC_STORE; or give the URL of a run in a store",
    )


def check_outside(store: Store, destination: Path) -> None:
    """Raise ConfigError for a destination inside the store."""
    root = directory_of(store)
    if root is not None and destination.resolve().is_relative_to(Path(root).resolve()):
        raise ConfigError(f"{destination}: lies inside the store {root}", hint="name a directory outside of the store")


def _run_and_checkpoint(parts: tuple[str, ...]) -> str:
    """Join a path below a store's root, without the folders of consolidated models and records."""
    if not parts:
        raise ConfigError("the URL names a store, but no run in it", hint="`ckptsync ls` lists the runs")
    return "/".join(part for part in parts if part not in (CONSOLIDATED, OURS))


def _check_readable(faults: tuple[Fault, ...], run: str, name: str) -> None:
    """Raise the error of a record that cannot be read: nothing can be said of its checkpoint."""
    for fault in faults:
        if fault.run == run and fault.location == name and fault.record.kind in ("manifest", "tombstone"):
            raise fault.error


def _missing(seen: Snapshot, plan: Plan) -> Incomplete | Corrupt:
    more = f"; and {len(plan.missing) - 8} more" if len(plan.missing) > 8 else ""
    kind = Corrupt if seen.status == "DAMAGED" else Incomplete
    return kind(
        f"{seen.run}/{seen.location}: not all of its files are in the store: {'; '.join(plan.missing[:8])}{more}",
        hint="choose another checkpoint (`ckptsync ls`), or get the files that are there with --unverified",
    )
