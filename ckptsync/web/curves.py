"""What a trainer logged of a run, as curves over steps.  Pure.

transformers (trainer_callback.py, TrainerState) keeps all of a training in ``log_history`` of
``trainer_state.json``, in the order of time: mappings with ``step`` and what was measured.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from ckptsync.typed_json import Decoder

LIMIT = 32 << 20  # bytes of a trainer_state.json: about 200,000 entries
BUCKETS = 1000  # of a curve; each has its least and its greatest value
MOST = 50  # metrics
_NOT_JSON = re.compile(rb"(?<=[\s:,\[])(?:NaN|-?Infinity)(?=[\s,\]}])")  # as Python writes them

Curve = list[tuple[int, float]]


class _State(msgspec.Struct):
    log_history: list[dict[str, float | str | bool | None]] = []


_STATE = Decoder(_State, "a trainer's state", LIMIT)


def read_curves(data: bytes, name: str) -> dict[str, Curve]:
    """Return the curve of each metric, every point; raises Corrupt.

    Values that are not finite are left out. Where a training went back, its later points count.
    """
    curves: dict[str, dict[int, float]] = {}
    for entry in _STATE.decode(_NOT_JSON.sub(b"null", data), name).log_history:
        step = entry.get("step")
        if isinstance(step, bool) or not isinstance(step, int | float) or not 0 <= step < 2**53:
            continue
        for metric, value in entry.items():
            if metric not in curves and (len(curves) >= MOST or not _is_metric(metric)):
                continue
            if isinstance(value, int | float) and math.isfinite(value):
                curves.setdefault(metric, {})[int(step)] = float(value)
    return {metric: sorted(points.items()) for metric, points in curves.items()}


def _is_metric(name: str) -> bool:
    return name in ("loss", "learning_rate", "grad_norm") or name.startswith("eval_")


def thinned(curve: Sequence[tuple[int, float]], buckets: int = BUCKETS) -> Curve:
    """Return the least and the greatest point of each bucket of steps, at most two of each."""
    if len(curve) <= 2 * buckets:
        return list(curve)
    first, last = curve[0][0], curve[-1][0]
    width = (last - first) / buckets
    extremes: dict[int, tuple[tuple[int, float], tuple[int, float]]] = {}
    for point in curve:
        number = min(buckets - 1, int((point[0] - first) / width))
        low, high = extremes.get(number, (point, point))
        extremes[number] = (
            min(low, point, key=lambda p: p[1]),
            max(high, point, key=lambda p: p[1]),
        )
    return sorted({point for pair in extremes.values() for point in pair})


def value_at(curves: Mapping[str, Curve], metric: str, step: int | None) -> float | None:
    """Return the last value of a metric up to a step; None if there is none."""
    points = curves.get(metric, [])
    if step is None or not points or points[0][0] > step:
        return None
    return points[bisect_right(points, step, key=lambda p: p[0]) - 1][1]
