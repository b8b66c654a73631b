"""Every checkpoint that is complete becomes one model, sealed; what is damaged is made again."""

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
from ckptsync.merge.plan import Options
from ckptsync.model import Files
from ckptsync.records.state import Snapshot
from ckptsync.stores import top
from ckptsync.stores.contract import Store


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """``config_from``: run (or ``*``) → local directory with the configuration and tokenizer of its base model.  ``engine``: where models are made."""

    merge: Options = field(default_factory=Options)
    config_from: Mapping[str, str] = field(default_factory=dict)
    engine: Elsewhere | None = None


def one(
    store: Store, run: str, place: str, options: HeadOptions, *, progress: Progress | None = None, work: Work | None = None
) -> tuple[Made, ...]:
    """Do what is due of a place as it is now; of all sealed places of a run, if ``place`` is empty, add what has come since.

    Raises what `sealing` raises; of several places the first error, after all were tried.
    """
    found = fresh_checkpoints(store, run, [place.partition("~")[0], FINAL]) if place else fresh(store, run)
    configured = cache(top.named)
    making = Making(options.merge, progress, work, options.engine)
    made: list[Made] = []
    errors: list[CkptsyncError] = []
    for snapshot in found.readable:
        task = deciding.task(snapshot)
        if snapshot.place != place and (place or task.deed != "complete"):
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


def _done(store: Store, snapshot: Snapshot, task: Task, look: Callable[[], Sequence[Origin]], making: Making) -> Made | None:
    if task.deed == "consolidate":
        return sealing.consolidate(store, snapshot, making, look())
    if task.deed == "complete":
        return sealing.complete(store, snapshot, look())
    return sealing.mend(store, snapshot, task.files, look(), making) if task.deed == "mend" else None


def _origins(
    store: Store, snapshot: Snapshot, options: HeadOptions, catalogue: Fresh, configured: Callable[[str], Files]
) -> Sequence[Origin]:
    """After the checkpoint itself: the model that the trainer left in the run's root, then what the operator gave."""
    finals = [
        s for s in catalogue.readable if (s.run, s.checkpoint) == (snapshot.run, FINAL) and s.word not in ("AMBIGUOUS", "RETIRED")
    ]
    newest = sorted(finals, key=lambda s: (max(k.manifest.ended for k in s.manifests), s.place))[-1:]
    found = [Origin(FINAL, sealing.source_files(store, s)) for s in newest if s.place != snapshot.place]
    directory = options.config_from.get(snapshot.run) or options.config_from.get(ANY_RUN)
    return [*found, Origin(CONFIG_FROM, configured(directory))] if directory else found
