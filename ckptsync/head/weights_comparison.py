"""Compare a model's weights with those of the models beside it in its run, by their records.

Models are made in any order, the newest first if many wait. So when a model is made, the findings
of the models after it are made again; a further record is written only if they have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from math import inf

from ckptsync.checkpoint_dirs import FINAL, series_and_step
from ckptsync.records.io import create_record, next_number, read_records
from ckptsync.records.location_status import group_records, record_names
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.store_paths import checkpoint_of, records_prefix
from ckptsync.records.weights_findings import (
    EARLIER,
    CountedModel,
    counted_model,
    find_weights,
    with_values,
)
from ckptsync.records.weights_record import WeightsFinding, WeightsRecord, last_findings, records_of
from ckptsync.safe_names import RECORDS
from ckptsync.stores.contract import Store

SMALLER = "smaller"
_TRIES = 2 * EARLIER  # locations on a side in which records are looked for
_Place = tuple[float, str]
"""A step and a location."""


@dataclass(frozen=True, slots=True)
class _RecordedModel:
    """A model with its weights records, and the number of its next one."""

    model: CountedModel
    records: tuple[WeightsRecord, ...]
    number: int


def record_weights(
    store: Store,
    record: ModelRecord,
    counts: WeightsRecord,
    doubts: Iterable[str],
    norm_jump: float,
) -> None:
    """Write the weights record of a model with its findings, and further records of later models.

    Reads the records of up to `EARLIER` models before it, which it is compared with, and of the
    run's first for a tensor with infinity. Up to `EARLIER` models after it are compared again; one
    whose findings change gets a further record.

    ``counts``: the record without findings; ``doubts``: why the model may lack tensors, each a
    `SMALLER` finding; ``norm_jump``: see `find_weights`. Raise as `create_record` does.
    """
    run, location = record.run, record.location
    step = _series_and_step(location)[1]
    own_model = with_values(location, inf if step is None else step, record.tensors, counts.values)
    places_before, places_after = _list_neighbours(store, run, location)
    earlier = [r.model for r in _read_models(store, run, reversed(places_before), EARLIER)]

    @cache
    def read_first() -> CountedModel | None:
        """Return the run's first model before this one, or None; it is read once.

        Raise StoreError.
        """
        return next((r.model for r in _read_models(store, run, places_before, 1)), None)

    smaller = [WeightsFinding(SMALLER, doubt) for doubt in doubts]
    findings = (*find_weights(own_model, earlier, read_first, norm_jump), *smaller)
    compared = tuple(model.location for model in earlier)
    create_record(store, replace(counts, findings=findings, compared=compared))
    models = [own_model, *earlier]
    for later in [*_read_models(store, run, places_after, EARLIER)]:
        models_before = models[:EARLIER]
        findings = find_weights(
            later.model, models_before, lambda: read_first() or own_model, norm_jump
        )
        compared = tuple(model.location for model in models_before)
        _record_findings(store, later, findings, compared)
        models.insert(0, later.model)


def _record_findings(
    store: Store,
    later: _RecordedModel,
    findings: tuple[WeightsFinding, ...],
    compared: tuple[str, ...],
) -> None:
    """Write a further weights record of a model if its last one has other findings.

    The last one's findings about missing tensors (`SMALLER`) are kept. Raise as `create_record`
    does.
    """
    old_findings = last_findings(later.records)
    findings = (*findings, *(f for f in old_findings or () if f.kind == SMALLER))
    if findings != old_findings:
        further = replace(
            later.records[0], n=later.number, values=(), findings=findings, compared=compared
        )
        create_record(store, further)


def _series_and_step(location: str) -> tuple[str, float | None]:
    """Return the name of a location's series, and its step: infinite for the final model.

    The step is None if the name has none.
    """
    checkpoint = checkpoint_of(location)
    return ("", inf) if checkpoint == FINAL else series_and_step(checkpoint)


def _list_neighbours(store: Store, run: str, location: str) -> tuple[list[_Place], list[_Place]]:
    """Return the locations of a run before and after one, by step; of each step the last by name.

    Only locations of its series and of other steps count; the final model belongs to each series.
    Both are empty if its own name has no step. Raise StoreError.
    """
    series, step = _series_and_step(location)
    places: dict[float, str] = {}
    for name in sorted(store.dirs(f"{run}/{RECORDS}/")) if step is not None else ():
        other_series, other_step = _series_and_step(name)
        if other_step not in (None, step) and (inf in (step, other_step) or other_series == series):
            places[other_step or 0] = name
    ordered = sorted(places.items())
    own_index = sum(other_step < (step or 0) for other_step in places)
    return ordered[:own_index], ordered[own_index:]


def _read_models(
    store: Store, run: str, places: Iterable[_Place], most: int
) -> Iterator[_RecordedModel]:
    """Yield the first ``most`` models with values in their weights records, read one by one.

    At most `_TRIES` places are read. Raise StoreError.
    """
    models = (_read_model(store, run, *place) for place in islice(places, _TRIES))
    yield from islice((model for model in models if model), most)


def _read_model(store: Store, run: str, step: float, location: str) -> _RecordedModel | None:
    """Read the model of a location, of its newest model record that can be read.

    None if there is none, or no weights record has values of the same tensors. Raise StoreError.
    """
    names = record_names(e.name for e in store.names(records_prefix(run, location)))
    kinds = {name.kind for name in names.values()}
    if not {"model", "weights"} <= kinds:
        return None
    own_names = [name for name in names.values() if name.kind in ("model", "weights")]
    records = group_records(read_records(store, own_names)[0])
    if not records.model_records:
        return None
    tensors = max(records.model_records.values(), key=lambda record: record.n).tensors
    own_records = records_of(tensors, records.weights)
    model = counted_model(location, step, tensors, own_records)
    return (
        _RecordedModel(model, own_records, next_number(names, location, "weights"))
        if model
        else None
    )
