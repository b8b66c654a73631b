"""Every checkpoint that is complete becomes one model, consolidated; what is damaged is made again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

from ckptsync.catalogue.fresh import Fresh, fresh, fresh_checkpoints
from ckptsync.errors import CkptsyncError
from ckptsync.head import deciding, sealing
from ckptsync.head.agreeing import CONFIG_FROM, Origin
from ckptsync.head.deciding import Task
from ckptsync.head.errands import ANY_RUN, FINAL
from ckptsync.head.sealing import Elsewhere, Made, Making
from ckptsync.merge.consolidate import Progress
from ckptsync.merge.copying import Work
from ckptsync.merge.output import is_beside
from ckptsync.merge.plan import Options
from ckptsync.model import Files
from ckptsync.records.model_record import is_same_model
from ckptsync.records.state import Snapshot
from ckptsync.stores import tree
from ckptsync.stores.contract import Store


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """``config_from``: run (or ``*``) → local directory with the configuration and tokenizer of its base model.  ``engine``: where models are made."""

    merge: Options = field(default_factory=Options)
    config_from: Mapping[str, str] = field(default_factory=dict)
    engine: Elsewhere | None = None


def one(
    store: Store, run: str, location: str, options: HeadOptions, *, progress: Progress | None = None, work: Work | None = None
) -> tuple[Made, ...]:
    """Do what is due of a location as it is now; of all consolidated locations of a run, if ``location`` is empty, add what has come since.

    Raises what `sealing` raises; of several locations the first error, after all were tried.
    """
    found = _around(store, run, location) if location else fresh(store, run)
    configured = cache(tree.top_files)
    making = Making(options.merge, progress, work, options.engine)
    made: list[Made] = []
    errors: list[CkptsyncError] = []
    for snapshot in found.readable:
        task = deciding.task(snapshot)
        if snapshot.location != location and (location or task.deed != "complete"):
            continue
        try:
            done = _done(store, snapshot, task, partial(_origins, store, snapshot, options, found, configured), making)
        except CkptsyncError as e:
            errors.append(e)
        else:
            made += [done] if done else []
    if errors:
        raise errors[0]
    return tuple(made)


def _around(store: Store, run: str, location: str) -> Fresh:
    """Return what is known of a location, and of those that may have lent it a configuration."""
    names = [location.partition("~")[0], FINAL]
    found = fresh_checkpoints(store, run, names)
    lent = {name.partition("~")[0] for s in found.readable if s.location == location for name in _lenders(s)}
    return fresh_checkpoints(store, run, [*names, *lent]) if lent.difference(names) else found


def _lenders(snapshot: Snapshot) -> set[str]:
    """Return the locations that its model record says that files came from."""
    told = snapshot.model_record.options.get("config", "") if snapshot.model_record else ""
    return {origin for _, _, origin in (word.partition("=") for word in told.split())} - {FINAL, CONFIG_FROM}


def _done(store: Store, snapshot: Snapshot, task: Task, look: Callable[[], Sequence[Origin]], making: Making) -> Made | None:
    if task.deed == "consolidate":
        return sealing.consolidate(store, snapshot, making, look())
    if task.deed == "complete":
        return sealing.complete(store, snapshot, look())
    return sealing.mend(store, snapshot, task.files, look(), making) if task.deed == "mend" else None


def _origins(
    store: Store, snapshot: Snapshot, options: HeadOptions, catalogue: Fresh, configured: Callable[[str], Files]
) -> Sequence[Origin]:
    """Where files beside a model may come from, after the checkpoint itself: the final model, what the operator gave, another checkpoint."""
    finals = [
        s for s in catalogue.readable if (s.run, s.checkpoint) == (snapshot.run, FINAL) and s.status not in ("CONFLICT", "RETIRED")
    ]
    newest = sorted(finals, key=lambda s: (max(k.manifest.ended for k in s.manifests), s.location))[-1:]
    found = [Origin(FINAL, sealing.source_files(store, s)) for s in newest if s.location != snapshot.location]
    directory = options.config_from.get(snapshot.run) or options.config_from.get(ANY_RUN)
    given = [Origin(CONFIG_FROM, configured(directory))] if directory else []
    return [*found, *given, *_alike(store, snapshot, catalogue)]


def _alike(store: Store, snapshot: Snapshot, catalogue: Fresh) -> list[Origin]:
    """The newest other checkpoint of the run that has a configuration, and whose model has the very same tensors."""
    model_record, lent = snapshot.model_record, _lenders(snapshot)
    if model_record is None:
        return []
    others = (s for s in catalogue.readable if s.run == snapshot.run and s.checkpoint != FINAL and s.location != snapshot.location)
    able = [s for s in others if s.status not in ("CONFLICT", "RETIRED") and s.model_record and any(map(is_beside, s.present()))]
    able.sort(key=lambda s: (s.location in lent, max(k.manifest.ended for k in s.manifests), s.location))
    found = next((s for s in reversed(able) if s.model_record and is_same_model(model_record, s.model_record)), None)
    return [Origin(found.location, sealing.source_files(store, found))] if found else []
