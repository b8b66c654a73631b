"""Make what ``ckptsync ls RUN`` and ``ls RUN/CHECKPOINT`` print.

Of a run: a table with times, losses and metrics, below the curve of its loss.  Of a checkpoint: all
that records say of it, and the next command.  Both begin with `Row`, which adds to a location's
summary its values and the reasons of its status.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from ckptsync.catalogue.location_summary import TOKENIZER, Summary
from ckptsync.cli import output
from ckptsync.cli.screen import MOST, more
from ckptsync.quantities import show_duration, show_size
from ckptsync.records.location_status import STATUSES
from ckptsync.records.manifest_groups import Sibling
from ckptsync.status.live_catalogue import NodeProgress, by_location, describe
from ckptsync.status.location_details import describe_progress
from ckptsync.status.locations import model_url, newer_saves
from ckptsync.status.training_curves import Curve

METRICS = 3  # columns of metrics that events measured
CELLS = 60  # columns of a sparkline
BLOCKS = "▁▂▃▄▅▆▇█"
MODELS = ("opens", "no config", "damaged", "none")
NONE = "-"


@dataclass(frozen=True, slots=True)
class Row:
    """A location with its times and losses (``values``), and the lines of `reasons`."""

    summary: Summary
    values: Mapping[str, Any]
    reasons: tuple[str, ...]


def read_rows(
    url: str,
    summaries: Sequence[Summary],
    running: Sequence[NodeProgress],
    curves: Mapping[str, Curve],
    now: float,
) -> list[Row]:
    """Return the rows of locations of the store at ``url``; no row is read from the store."""
    newer, entries = newer_saves(summaries), by_location(running)
    return [
        Row(
            s,
            describe_progress(s, curves),
            tuple(reasons(url, s, entries.get(key, ()), newer.get(key, ""), now=now)),
        )
        for s in summaries
        for key in ((s.run, s.location),)
    ]


def reasons(
    url: str,
    s: Summary,
    activities: Sequence[NodeProgress],
    newer: str,
    *,
    now: float,
    model: str | None = None,
) -> Iterator[str]:
    """Yield lines about a location: findings, activities of nodes, why its status is no better.

    Activities replace the reasons that they explain.  If the location has a model, ``model``, or
    what the model lacks, replaces all reasons.  While files are uploaded and no node says so, the
    percentage comes first.  Doubts, newer saves and other parts of the save follow.

    Args:
        url: the store.
        s: the location.
        activities: what nodes do with it.
        newer: the name of a newer save of the same checkpoint, or "".
        now: seconds since the epoch.
        model: the text about its model, in a list of all runs; then only one reason is yielded.

    """
    status_reasons = s.missing_lines or s.evidence
    busy_nodes = {e.node for e in activities}
    is_rest_on_its_way = (
        bool(s.uploading and s.awaited_nodes) and set(s.awaited_nodes) <= busy_nodes
    )
    is_explained = is_rest_on_its_way or s.status == "COMPLETE" or not s.manifests
    if activities and is_explained:  # the activities are the reason
        status_reasons = ()
    if model is not None:
        status_reasons = tuple(filter(None, [output.first_of(status_reasons)]))
    if s.uploading and not activities:
        status_reasons = (upload_line(s.uploading, s.percent), *status_reasons)
    lines = [
        *(finding.line for finding in s.weights_findings),
        *(describe(e, now) for e in activities),
        *((model or s.unopenable,) if has_model(s) else status_reasons),
        *(d for d in s.doubts if d not in s.evidence),
        f"{newer} is newer" if newer else "",
        *(sibling_line(url, s.run, s.location, sibling) for sibling in s.siblings),
        s.unnamed_line,
    ]
    yield from filter(None, lines)


def has_model(s: Summary) -> bool:
    """Return whether a location has a model and is VERIFIED or CONSOLIDATED."""
    return s.status in ("VERIFIED", "CONSOLIDATED") and s.consolidated


def upload_line(nodes: Sequence[str], percent: int | None) -> str:
    """Return which nodes upload a checkpoint, and the percentage of its model that is stored."""
    return f"from {', '.join(nodes)}{f', {percent} %' if percent is not None else ''}"


def sibling_line(url: str, run: str, location: str, sibling: Sibling) -> str:
    """Return a line about another part of the same save, with the command that joins them."""
    nodes, command = ", ".join(sibling.nodes), sibling.command(url, run, location)
    if not sibling.against:
        return (
            f"{sibling.location} of {nodes} is another part of this save; to join them: {command}"
        )
    guess = f"{sibling.location} of {nodes} may be another part of this save"
    return f"{guess} ({'; '.join(sibling.against)}); if so: {command}"


def _model(s: Summary) -> str:
    """Return the column MODEL, one of `MODELS`: "none" if it is retired or has no model.

    "damaged" if files are suspect; else "no config" if it cannot be loaded, or "opens".
    """
    if s.retired or not s.consolidated:
        return "none"
    if s.suspects:
        return "damaged"
    return "no config" if s.unopenable else "opens"


def _resume(s: Summary) -> str:
    """Return "yes" if a training can resume from a location; "no" also if shards are retired."""
    return "yes" if s.resume and not (s.retired or s.shards_retired) else "no"


def _least(value: float | None) -> tuple[bool, float]:
    """Return a sort key: the least value first, an unknown one last."""
    return value is None, value or 0.0


SORT: Mapping[str, Callable[[Row], Any]] = {
    "step": lambda r: _least(r.summary.step),
    "age": lambda r: -r.summary.ended,
    "loss": lambda r: _least(r.values["loss"]),
    "eval": lambda r: _least(r.values["eval_loss"]),
    "size": lambda r: r.summary.whole or r.summary.size,
    "nodes": lambda r: len(r.summary.nodes),
    "status": lambda r: STATUSES.index(r.summary.status),
    "model": lambda r: MODELS.index(_model(r.summary)),
    "resume": lambda r: _resume(r.summary) == "no",
    "kept": lambda r: not r.summary.kept,
}
"""The sort key of each column: the least first, unknown values last."""
RUN_HEADING = (*map(str.upper, SORT), "REASON")


def list_rows_of_run(rows: Sequence[Row], now: float) -> tuple[list[str], list[list[str]]]:
    """Return a heading, and the rows of a run, in the given order.

    Before SIZE stand the first `METRICS` by name of the metrics that events measured.
    """
    names = sorted({name for row in rows for name, _ in row.summary.metrics})
    index, names = RUN_HEADING.index("SIZE"), names[:METRICS]
    measured = [dict(row.summary.metrics) for row in rows]
    cells = [list_row(row, now) for row in rows]
    return [*RUN_HEADING[:index], *names, *RUN_HEADING[index:]], [
        [*row_cells[:index], *(_number(values.get(name)) for name in names), *row_cells[index:]]
        for row_cells, values in zip(cells, measured, strict=True)
    ]


def list_row(row: Row, now: float) -> list[str]:
    """Return a location as cells under `RUN_HEADING`, with its first reason; `NONE` if unknown."""
    s = row.summary
    return [
        _step(s),
        show_duration(max(0, round(now - s.ended))) if s.ended else NONE,
        _number(row.values["loss"]),
        _number(row.values["eval_loss"]),
        show_size(s.whole or s.size),
        str(len(s.nodes)),
        s.status,
        _model(s),
        _resume(s),
        "yes" if s.kept else NONE,
        output.first_of(row.reasons),
    ]


def _step(s: Summary) -> str:
    """Return the step of ``checkpoint-STEP``; the name of any other location."""
    return str(s.step) if s.location == f"checkpoint-{s.step}" else s.location


def _number(value: float | None) -> str:
    """Return a number with four significant digits; `NONE` if it is not known."""
    return NONE if value is None else f"{value:.4g}"


def curve_line(curves: Mapping[str, Curve], encoding: str | None, cells: int = CELLS) -> list[str]:
    """Return one line with the sparkline of the loss, its first and last value, and the steps.

    Return [] for less than two known losses, or if ``encoding`` has no blocks.
    """
    points = curves.get("loss", [])
    numbers = [value for _, value in points if value is not None]
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return []
    if len(numbers) < 2:
        return []
    steps = f"steps {points[0][0]} to {points[-1][0]}"
    ends = f"loss {_number(numbers[0])}", f"{_number(numbers[-1])}, {steps}"
    return [f"{ends[0]} {sparkline(points, cells)} {ends[1]}"]


def sparkline(points: Curve, cells: int) -> str:
    """Return at most ``cells`` blocks, one a point if there are fewer points.

    Each is as high as the mean of its points between the least and the greatest mean, and blank if
    none is known.  At least one point must be known.
    """
    cells, means = min(cells, len(points)), []
    for i in range(cells):
        cell_points = points[i * len(points) // cells : (i + 1) * len(points) // cells]
        numbers = [value for _, value in cell_points if value is not None]
        means.append(sum(value / len(numbers) for value in numbers) if numbers else None)
    finite = [mean for mean in means if mean is not None]
    least, height = min(finite), max(finite) / 2 - min(finite) / 2
    return "".join(
        " "
        if mean is None
        else BLOCKS[round((mean / 2 - least / 2) / height * (len(BLOCKS) - 1)) if height else 0]
        for mean in means
    )


def full_lines(url: str, row: Row, details: Mapping[str, Any], now: float) -> Iterator[str]:
    """Yield all that is known of a location as lines, and the next command.

    ``details``: the result of `read_details`.  Empty facts are left out.  At most `MOST` files are
    listed, those that are not stored first.
    """
    s, model = row.summary, model_url(url, row.summary)
    ranks = dict(s.ranks)
    nodes = (f"{n} (ranks {ranks[n]})" if ranks.get(n) else n for n in s.nodes)
    times = {name: row.values[name] for name in ("saved", "uploaded", "merged", "verified")}
    level = s.proof.level if s.status == "VERIFIED" else None
    measured = dict(s.metrics)  # comes before what the trainer logged under the same name
    names = {"loss": "loss", "evaluation": "eval_loss"}
    losses = {title: measured.pop(name, row.values[name]) for title, name in names.items()}
    model_notes = [_model(s), s.supply_hint, model or ""]
    left_out_note = f"code left out: {', '.join(s.left_out)}" if s.left_out else ""
    tokenizer_note = "no tokenizer" if TOKENIZER in s.to_open else ""
    facts = {
        "status": f"{s.status} ({level})" if level else s.status,
        **{name: _time(moment, now) for name, moment in times.items() if moment},
        **{name: _number(value) for name, value in losses.items() if value is not None},
        "metrics": ", ".join(f"{name} {_number(value)}" for name, value in measured.items()),
        "size": f"{show_size(s.whole or s.size)}, {details['files_total'] or s.files} files",
        "nodes": ", ".join(nodes),
        "model": "; ".join(filter(None, [*model_notes, tokenizer_note, left_out_note])),
        "weights": "; ".join(weights_lines(s)),
        "resume": "; ".join([_resume(s), *s.lacks]),
        "kept": details["reason_kept"] or "no",
        "retired": details["retired"],
    }
    yield f"{s.run}/{s.location}"
    yield from output.aligned([(f"  {name}", str(value)) for name, value in facts.items() if value])
    damage = (f"{d['file']}: {d['kind']}: {d['detail']}" for d in details["damage"])
    yield from (f"  {line}" for line in dict.fromkeys([*row.reasons, *damage]))
    files = [
        (f"  {f['name']}", show_size(f["bytes"]), f["node"] if f["stored"] else "not in the store")
        for f in sorted(details["files"], key=lambda f: bool(f["stored"]))
    ]
    if files:
        yield from output.aligned([("  FILE", "SIZE", "NODE"), *files[:MOST]])
        yield from (f"  {line}" for line in more(range(details["files_total"]), "more files"))
    yield f"next: {next_command(url, s)}"


def weights_lines(s: Summary) -> Iterator[str]:
    """Yield the norms of a model by group of layers, its zeros, NaNs and infinities.

    Yield nothing for a model without statistics.
    """
    if s.weights is None:
        return
    groups = s.weights.groups
    norms = [f"{g.group} {_number(g.norm)}" for g in groups if g.norm is not None]
    if norms:
        yield f"norm {', '.join(norms)}"
    zeros, size = sum(g.zeros for g in groups), sum(g.size for g in groups)
    yield f"{zeros} of {size} values are zero"
    nans, infinities = sum(g.nans for g in groups), sum(g.infinities for g in groups)
    yield f"NaN: {nans}, INFINITE: {infinities}" if nans or infinities else "no NaN, none infinite"
    if s.weights.uncounted:
        yield f"{s.weights.uncounted} tensors have no statistics"


def _time(moment: float, now: float) -> str:
    """Return a time of the epoch as local date and time, and how long ago it was."""
    date = datetime.fromtimestamp(moment, timezone.utc).astimezone()
    return f"{date:%Y-%m-%d %H:%M:%S}, {show_duration(max(0, round(now - moment)))} ago"


def next_command(url: str, s: Summary) -> str:
    """Return the command that helps most: ``join`` if a sibling certainly is of the same save.

    Else it depends on the status: ``ls --watch``, ``repair``, ``verify``, ``pull``, or ``status``.
    """
    target = f"{s.run}/{s.location}"
    for sibling in s.siblings:
        if not sibling.against:
            return sibling.command(url, s.run, s.location)
    words = {
        "WAITING": ["ls", target, "--watch"],
        "UPLOADING": ["ls", target, "--watch"],
        "DAMAGED": ["repair", target],
        "COMPLETE": ["verify", target],
        "CONSOLIDATED": ["verify", target],
        "VERIFIED": ["pull", target, "DIR"],
    }.get(s.status, ["status", s.run])
    return shlex.join(["ckptsync", *words, "--store", url])
