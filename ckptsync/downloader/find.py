"""Find in a store the checkpoint that a user names, and plan what to download of it.

The catalogue may be older than the store, so it only tells which checkpoint is meant; the plan is
made of the chosen checkpoint's records as they are now.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from pathlib import Path

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.catalogue.uncached import not_found, read_location
from ckptsync.downloader.choose import PulledPart, Trust, choose, split
from ckptsync.downloader.download_plan import PullPlan, plan_checkpoint, plan_model
from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.plain_json import parse
from ckptsync.records.location_status import Status
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import directory_of


@dataclass(frozen=True, slots=True)
class PullRequest:
    """What to download: ``what`` is ``RUN``, ``RUN/CHECKPOINT`` or ``RUN/latest``.

    ``node``: only the files that this node needs to resume.  ``is_model``: the consolidated model
    instead of the checkpoint.
    """

    what: str
    trust: Trust = "verified"
    node: str = ""
    is_model: bool = False


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint in the store: its status, its nodes, and the plan of its download."""

    run: str
    location: str
    status: Status
    plan: PullPlan
    nodes: tuple[str, ...] = ()


def find(store: Store, request: PullRequest) -> FoundCheckpoint:
    """Return the requested checkpoint with the plan of its download, from records read now.

    With ``trust`` `any`, a checkpoint (but no model) may lack files: ``plan.missing`` names them.
    Raise ConfigError if the run, the checkpoint, or a file of the node does not exist; Incomplete
    if it may not be given (`choose`), lacks files or a model, or has just moved; Corrupt for a
    CONFLICT, unsafe names, or DAMAGED with files missing; the error of its manifest or tombstone;
    StoreError.
    """
    what = request.what.strip("/")
    catalogue = read_catalogue(store, run=what.rpartition("/")[0] or what)
    run, name = split(what, catalogue.summaries)
    # Nothing can be said of a checkpoint whose manifests cannot be read.
    for fault in catalogue.faults:
        is_hiding = fault.record.kind in ("manifest", "tombstone")
        if is_hiding and (fault.run, fault.location) == (run, name):
            raise fault.error
    if run not in {s.run for s in catalogue.summaries}:
        raise not_found(store, run)
    part: PulledPart = "model" if request.is_model else "node" if request.node else "whole"
    choice = choose(catalogue.summaries, run, name, request.trust, part)
    location = choice.summary.location
    state = read_location(store, run, location).of(run, location)
    if state is None:
        raise Incomplete(
            f"{run}/{location}: it was moved or deleted a moment ago", hint="try again"
        )
    plan = plan_model(state) if request.is_model else plan_checkpoint(state, request.node)
    if plan.missing and (request.trust != "any" or request.is_model):
        more_text = f"; and {len(plan.missing) - 8} more" if len(plan.missing) > 8 else ""
        reason = f"not all of its files are in the store: {'; '.join(plan.missing[:8])}{more_text}"
        raise (Corrupt if state.status == "DAMAGED" else Incomplete)(
            f"{run}/{location}: {reason}",
            hint="choose another checkpoint (`ckptsync ls`), or get the files that are there with"
            " --unverified",
        )
    notes = [*choice.notes, *plan.notes]
    if request.is_model and (lacking := choice.summary.unopenable):
        give = choice.summary.supply_hint
        notes.append(f"{lacking}; copy it there from the model that was trained, or {give}")
    plan = replace(plan, notes=tuple(notes))
    return FoundCheckpoint(run, location, state.status, plan, choice.summary.nodes)


def why_retired(store: Store, run: str, location: str) -> str:
    """Read from the store why a checkpoint is being deleted, and return it; "" if it is not.

    Also a text if no manifest is left. Call it for a file that vanished during a download. Raise
    StoreError.
    """
    state = read_location(store, run, location).of(run, location)
    return state.conditions.retired if state else "all its manifests were replaced or deleted"


def absent_best(directory: Path) -> str:
    """Return the best checkpoint in ``trainer_state.json`` if it is not on this machine, else "".

    Also "" if that file is absent, unreadable or damaged. Hugging Face's Trainer loads the best
    checkpoint at the end of a training.
    """
    name = "trainer_state.json"
    # a trainer says more of a state that is damaged
    with contextlib.suppress(OSError, ValueError, Corrupt):
        state = parse((directory / name).read_bytes(), name)
        best = state.get("best_model_checkpoint") if isinstance(state, dict) else None
        if isinstance(best, str) and best and not Path(best).exists():
            return best
    return ""


def check_outside(store: Store, destination: Path) -> None:
    """Raise ConfigError if the destination, with links resolved, lies in the store's directory."""
    root = directory_of(store)
    if root is not None and destination.resolve().is_relative_to(Path(root).resolve()):
        raise ConfigError(
            f"{destination}: lies inside the store {root}",
            hint="name a directory outside of the store",
        )
