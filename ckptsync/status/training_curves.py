"""The metrics that a trainer logged of a run, as curves over steps.

transformers writes all of a training's metrics into each checkpoint (``log_history`` of
``trainer_state.json``: mappings with ``step`` and metrics, in the order of time; see TrainerState
in trainer_callback.py). So the newest file of a run has all of its curves.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from ckptsync.catalogue.location_summary import Summary, by_age
from ckptsync.errors import CkptsyncError, Corrupt, NotFound
from ckptsync.records.store_paths import file_name
from ckptsync.stores.contract import Store, read_all
from ckptsync.typed_json import Decoder

STATE = "trainer_state.json"
TRIES = 3  # locations in which a trainer's state is looked for, the newest first
LIMIT = 32 << 20  # bytes of a trainer_state.json: about 200,000 entries
BUCKETS = 1000  # of a curve; each has its least and its greatest value
MOST = 50  # metrics
_NOT_JSON = re.compile(rb"(?<=[\s:,\[])(?:NaN|-?Infinity)(?=[\s,\]}])")  # as Python writes them

Point = tuple[int, float | None]
"""A step, and its value; None where that was not finite."""
Curve = list[Point]


class _State(msgspec.Struct):
    # metrics of one's own may be nested; they are no curves
    log_history: list[dict[str, float | str | bool | list[Any] | dict[str, Any] | None]] = []


_STATE = Decoder(_State, "a trainer's state", LIMIT)


def states_of(summaries: Iterable[Summary]) -> list[Summary]:
    """Return the `TRIES` newest locations of a run that are not retired, the newest first."""
    newest = [s for s in reversed(by_age(summaries)) if s.manifests and not s.retired]
    return newest[:TRIES]


def read_newest(store: Store, locations: Iterable[Summary]) -> dict[str, Curve]:
    """Return the curves in the first trainer's state that can be read; {} if there is none.

    ``locations``: of one run, as `states_of` returns them.  Reads the store.  A missing or corrupt
    state is skipped; any other error of the store ends the search.  Never raises CkptsyncError.
    """
    for s in locations:
        name = file_name(s.run, s.location, STATE)
        try:
            return read_curves(read_all(store, name, LIMIT), name)
        except (NotFound, Corrupt):
            continue
        except CkptsyncError:
            break  # curves are no reason to show nothing
    return {}


def read_curves(data: bytes, name: str) -> dict[str, Curve]:
    """Return the curve of each metric in a trainer's state, by step. Raises Corrupt.

    Curves are the loss, the learning rate, the gradient's norm and ``eval_…``: the first `MOST` of
    them, and their floats only. A value that is not finite is None. If a training went back to an
    earlier step, its later values count.
    """
    curves: dict[str, dict[int, float | None]] = {}
    for entry in _STATE.decode(_NOT_JSON.sub(b"null", data), name).log_history:
        step = entry.get("step")
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 <= step < 2**53:
            continue
        for metric, value in entry.items():
            if metric not in curves and (len(curves) >= MOST or not _is_metric(metric)):
                continue
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                curves.setdefault(metric, {})[int(step)] = None
            elif isinstance(value, float):
                curves.setdefault(metric, {})[int(step)] = value
    return {metric: sorted(points.items(), key=_step) for metric, points in curves.items()}


def with_metrics(curves: Mapping[str, Curve], summaries: Iterable[Summary]) -> dict[str, Curve]:
    """Return the curves and those of metrics that events measured, which win if names are equal.

    At most `MOST` names are measured ones; locations without a step are left out. Of two locations
    of one step the newer one counts.
    """
    measured: dict[str, dict[int, float | None]] = {}
    for s in by_age(summaries):
        for name, value in s.metrics if s.step is not None else ():
            if name in measured or len(measured) < MOST:
                measured.setdefault(name, {})[s.step or 0] = value
    points = {
        name: sorted(points_by_step.items(), key=_step) for name, points_by_step in measured.items()
    }
    return {**curves, **points}


def _is_metric(name: str) -> bool:
    """Return whether a key of ``log_history`` is shown as a curve."""
    return name in ("loss", "learning_rate", "grad_norm") or name.startswith("eval_")


def thinned(curve: Sequence[Point], buckets: int = BUCKETS) -> Curve:
    """Return a curve of at most three points a bucket of steps: least, greatest, one not finite.

    A curve of at most two points a bucket is returned whole, as a copy.
    """
    if len(curve) <= 2 * buckets:
        return list(curve)
    first, last = curve[0][0], curve[-1][0]
    width = (last - first) / buckets
    result: Curve = []
    for _, points in groupby(curve, lambda point: int((point[0] - first) / width)):
        values: Curve = list(points)
        numbers = [(value, step) for step, value in values if value is not None]
        missing = [point for point in values if point[1] is None][:1]
        extremes = {min(numbers), max(numbers)} if numbers else set()
        result += sorted([*missing, *((step, value) for value, step in extremes)], key=_step)
    return result


def _step(point: Point) -> int:
    """Return the step of a point."""
    return point[0]


def value_at(curves: Mapping[str, Curve], metric: str, step: int | None) -> float | None:
    """Return the last value of a metric up to a step; None if there is none."""
    points = curves.get(metric, [])
    if step is None or not points or points[0][0] > step:
        return None
    return points[bisect_right(points, step, key=_step) - 1][1]
