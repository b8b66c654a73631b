"""``ckptsync diff``: compare two checkpoints, models or adapters tensor by tensor.

Two checkpoints can hold the same model in different shards, so the tensors that ``merge`` would
write of each are compared.  A checkpoint of a store stands for its consolidated model, if it has
one: its record has the digest of every tensor, and tensors of one digest are not read.
"""

from __future__ import annotations

import argparse
import math
import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptsync.catalogue.uncached import not_found, read_location
from ckptsync.cli import output
from ckptsync.cli.arguments import (
    CHECKPOINT,
    access_of,
    add_bandwidth,
    add_store_option,
    is_path,
    store_run_location,
)
from ckptsync.cli.inspect import check_exists
from ckptsync.cli.output import Progress, say
from ckptsync.errors import ConfigError, Corrupt, Incomplete, Unsupported
from ckptsync.head.consolidate import source_files
from ckptsync.merger.inputs import MergeRequest, check_unchanged, open_sources
from ckptsync.merger.model_differences import (
    STATES,
    Difference,
    Distance,
    GroupDifferences,
    Side,
    State,
    bytes_to_read,
    compare_tensors,
    count_by_group,
    index_by_name,
    most_changed,
    planned_side,
    read_changes,
    recorded_tensor,
)
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import prepare
from ckptsync.merger.readers import open_reader
from ckptsync.quantities import show_size
from ckptsync.records.location_status import LocationState
from ckptsync.records.model_record import ModelRecord
from ckptsync.records.store_paths import consolidated_prefix
from ckptsync.stores.checkpoint_files import FileTree, StoreFiles
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import Access
from ckptsync.stores.urls import located
from ckptsync.tensors import Extent
from ckptsync.verifier.verification import InStore, resolve_target

TOP = 10  # tensors of a kind that are shown
DIFFERENT = 1  # exit code
NONE = "-"
_NOWHERE = Path(os.devnull)  # nothing is written
_OF_MERGE = ("--config-from", "--base")  # notes that advise these options of merge are left out
DETAILS = (
    "Compared is what `merge` would write of each. The exit code is 0 if all is the same, 1 if not."
    " What recorded digests show to be equal is not read. The relative change of a tensor is the"
    " norm of B - A by the norm of A."
)
NOTES = """\
A checkpoint of a store is its consolidated model, else its shards.

Two elements are equal if their bits are: NaN equals the same NaN, 0 does not equal -0. Tensors
of another dtype are compared by value, those of another shape not.

RELATIVE is the L2 norm of B - A divided by that of A, LARGEST the largest difference of two
elements. Both leave out elements that are NaN or infinite on one side; those are counted.

The exit codes of errors are those of `merge`.
"""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """One of the two models, opened.

    ``target``: its name in the command.  ``source``: which weights of it are compared.  ``trees``:
    directories that must not change while they are read.
    """

    target: str
    source: str
    side: Side
    notes: tuple[str, ...] = ()
    trees: tuple[FileTree, ...] = ()


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Define the command's arguments."""
    add = command.add_argument
    kinds = f"{CHECKPOINT} of a store, or a path or URL of a checkpoint, a model or an adapter"
    add("a", metavar="A", nargs="+", help=f"{kinds}; several directories of one save, one a node")
    add("b", metavar="B", help="the same, to compare it with")
    add_store_option(command)
    add(
        "--top",
        metavar="N",
        type=int,
        help=f"list the N most changed tensors (default: {TOP}; with --json all)",
    )
    add(
        "--digests",
        action="store_true",
        help="compare recorded digests only: say which tensors differ and not how far, and read no"
        " weights; for consolidated checkpoints of a store",
    )
    add(
        "--source",
        metavar="SOURCE",
        action="append",
        default=[],
        help="which weights, as `inspect` names them, if A and B hold several; given twice, those"
        ' of A and then those of B, "" for what `merge` would take; of a checkpoint in a store its'
        " shards",
    )
    add_bandwidth(command)


def run(args: argparse.Namespace) -> int:
    """Compare A and B, print what differs, and return `DIFFERENT` if anything does, else 0.

    Tensors whose recorded digests do not decide are read, unless ``--digests``.  Raises
    ConfigError, Incomplete (also if a file changed meanwhile), Unsupported, Corrupt or StoreError.
    """
    if args.top is not None and args.top < 0:
        raise ConfigError(f"--top: expected at least 0, not {args.top}")
    if len(args.source) > 2:
        raise ConfigError("--source: given more than twice", hint="once for A, once for B")
    access = access_of(args)
    sources = [*args.source, *args.source][:2] if args.source else ["", ""]
    a = _open(args, args.a, sources[0], access)
    b = _open(args, [args.b], sources[1], access)
    for opened in (a, b) if args.digests else ():
        if opened.side.tensors.keys() - opened.side.digests.keys():
            raise ConfigError(
                f"{opened.target}: no digests of its tensors are recorded",
                hint="leave --digests out, or name a consolidated checkpoint of a store",
            )
    differences, notes = compare_tensors(a.side, b.side), (*a.notes, *b.notes)
    size = 0 if args.digests else bytes_to_read(differences)
    if size:
        with output.progress(args, f"comparing {a.target} with {b.target}") as progress:
            count = _counter(progress, size)
            differences, read_notes = read_changes(a.side, b.side, differences, count)
        notes = (*notes, *read_notes)
        check_unchanged((*a.trees, *b.trees))
    notes = tuple(n for n in dict.fromkeys(notes) if not any(option in n for option in _OF_MERGE))
    code = DIFFERENT if any(d.state != "same" for d in differences) else 0
    if args.json:
        output.print_json(describe((a, b), differences, args.top, size, notes), code)
    else:
        _show(a, b, differences, TOP if args.top is None else args.top, notes)
    return code


def _counter(progress: Progress, total: int) -> Any:
    """Return a function that adds bytes, from any thread, and reports their sum under a lock."""
    lock, done = threading.Lock(), 0

    def count(size: int) -> None:
        """Add bytes that were read."""
        nonlocal done
        with lock:
            done += size
            progress(done, total)

    return count


def _open(
    args: argparse.Namespace, words: Sequence[str], source: str, access: Access
) -> OpenedModel:
    """Open what words name: one checkpoint of a store, or directories and URLs of one save.

    A single word counts as a path if it looks like one, or if it exists and no option names a
    store. ``source``: which weights; "" for those that `merge` takes.  Raises ConfigError,
    StoreError, and Incomplete, Unsupported or Corrupt, whose messages get the target's name.
    """
    target, is_named = " ".join(words), bool(args.url or args.config)
    first = words[0]
    try:
        if not (is_path(first) or (not is_named and Path(first).exists())) and len(words) == 1:
            return _open_stored(*store_run_location(args, first), target, source)
        if len(words) == 1:
            resolved = resolve_target(first, access)
            if isinstance(resolved, InStore):
                return _open_stored(resolved.store, resolved.run, resolved.location, target, source)
        check_exists(words)
        options = MergeOptions(source=source or None)
        request = MergeRequest([located(word) for word in words], _NOWHERE, options)
        prepared = open_sources(request, access)
        job, side = prepared.job, planned_side(prepared.job.plans, prepared.files)
        return OpenedModel(target, job.source, side, job.notes, prepared.trees)
    except (Corrupt, Incomplete, Unsupported) as e:
        if target not in str(e):
            e.args = (f"{target}: {e}",)
        raise
    except ConfigError as e:
        if not is_path(first) and Path(first).is_dir():
            e.hint = f"./{first} names the directory of this machine"
        raise


def _open_stored(store: Store, run: str, location: str, target: str, source: str) -> OpenedModel:
    """Open a checkpoint's consolidated model; its shards if it has none, or ``source`` is given.

    ``target``: its name in messages.  Raises ConfigError, also if it is not in the store;
    Incomplete, also for a CONFLICT or a retired one; Unsupported, also for records of a newer
    program; the first unreadable record's error if none of its manifests counts; StoreError.
    """
    if not location:
        raise ConfigError(f"{target}: expected {CHECKPOINT}", hint="`ckptsync ls` lists them")
    listing = read_location(store, run, location)
    if newer := listing.newer(run, location):
        raise newer
    state = listing.of(run, location)
    if state is None:
        for fault in listing.faults:
            raise fault.error
        raise not_found(store, run, location)
    conditions = state.conditions
    if conditions.conflict or conditions.retired:
        raise Incomplete(
            f"{target}: {conditions.conflict or conditions.retired}", hint="`ckptsync ls` says more"
        )
    if state.model_record and conditions.consolidated.holds and not source:
        side = _recorded(store, state, state.model_record)
        return OpenedModel(target, state.model_record.options.get("source", ""), side)
    files = source_files(store, state)
    job = prepare(files, MergeOptions(source=source or None), every=True)
    return OpenedModel(target, job.source, planned_side(job.plans, files), job.notes)


def _recorded(store: Store, state: LocationState, record: ModelRecord) -> Side:
    """Return the side of a consolidated model, with digests, from its record alone.

    Raises Corrupt if the record names a tensor twice, or a tensor's bytes cannot be what it says.
    """
    prefix = consolidated_prefix(state.run, state.location)
    sizes = {f.path: f.size for f in record.files}
    tensors = index_by_name(
        (t.file, recorded_tensor(
            t.name, t.dtype, t.shape, Extent(t.file, t.start, t.size), sizes.get(t.file)))
        for t in record.tensors
    )  # fmt: skip
    digests = dict(zip(tensors, (t.digest for t in record.tensors), strict=True))
    positions = {path: (prefix + path, size) for path, size in sizes.items()}
    return Side(tensors, open_reader(StoreFiles(store, positions), [store]), digests)


def describe(
    sides: Sequence[OpenedModel],
    differences: Sequence[Difference],
    top: int | None,
    size: int,
    notes: Sequence[str],
) -> dict[str, Any]:
    """Return the result for ``--json``.

    ``sides``: A and B; ``top``: how many tensors to list, None for all; ``size``: bytes read.
    """
    counts = Counter(d.state for d in differences)
    return {
        **{key: _describe_side(opened) for key, opened in zip("ab", sides, strict=True)},
        **{state: counts[state] for state in STATES},
        "bytes_read": size,
        **_describe_change(_total(differences)),
        "groups": [
            {"group": g.group, **{state: g.counts.get(state, 0) for state in STATES},
             **_describe_change(g.change)}
            for g in count_by_group(differences)
        ],
        "tensors": [_describe_tensor(d) for d in _top(differences, top)],
        "notes": list(notes),
    }  # fmt: skip


def _describe_side(opened: OpenedModel) -> dict[str, Any]:
    """Return A or B for ``--json``."""
    tensors = opened.side.tensors
    return {
        "target": opened.target,
        "source": opened.source,
        "tensors": len(tensors),
        "bytes": sum(tensor.size for tensor in tensors.values()),
        "has_digests": bool(opened.side.digests),
    }


def _describe_tensor(d: Difference) -> dict[str, Any]:
    """Return the difference of a tensor for ``--json``; a side that lacks it is None.

    The numbers of its change are None if it was not read.
    """
    sides = {"a": d.a, "b": d.b}
    return {
        "name": d.name,
        "state": d.state,
        **{
            key: {"dtype": tensor.dtype, "shape": list(tensor.shape)} if tensor else None
            for key, tensor in sides.items()
        },
        **_describe_change(d.change),
    }


def _describe_change(change: Distance | None) -> dict[str, Any]:
    """Return the numbers of a change for ``--json``; None for those unknown or not finite."""
    if change is None:
        keys = ("relative", "norm", "largest", "elements", "differing", "nonfinite")
        return dict.fromkeys(keys)
    numbers = {"relative": change.relative, "norm": change.norm, "largest": change.largest}
    finite = {key: n if n is not None and math.isfinite(n) else None for key, n in numbers.items()}
    counts = {"elements": change.elements, "differing": change.differing}
    return {**finite, **counts, "nonfinite": change.nonfinite}


def _total(differences: Sequence[Difference]) -> Distance | None:
    """Return the sum of the changes of all differing tensors that were read; None if none was."""
    changes = [d.change for d in differences if d.change and d.state != "same"]
    return sum(changes, Distance()) if changes else None


def _top(differences: Sequence[Difference], top: int | None) -> Iterator[Difference]:
    """Yield differing tensors, the most changed first, at most ``top`` of each kind.

    The kinds are: only in A, only in B, in both.  None yields all.
    """
    shown: Counter[str] = Counter()
    for d in most_changed(differences):
        kind = d.state if d.state in ("only_a", "only_b") else "both"
        shown[kind] += 1
        if top is None or shown[kind] <= top:
            yield d


def _show(
    a: OpenedModel,
    b: OpenedModel,
    differences: Sequence[Difference],
    top: int,
    notes: Sequence[str],
) -> None:
    """Print the comparison for people: models, notes, counts, groups of layers, differing tensors.

    At most ``top`` tensors of each kind (`_top`), then how many more.  If all are the same, only
    that is printed after the notes.
    """
    for name, opened in (("A", a), ("B", b)):
        size = show_size(sum(tensor.size for tensor in opened.side.tensors.values()))
        say(f"{name}  {opened.target}: {opened.source}, {len(opened.side.tensors)} tensors, {size}")
    for note in notes:
        say(f"note  {note}")
    counts = Counter(d.state for d in differences)
    if counts["same"] == len(differences):
        say(f"same: all {len(differences)} tensors")
        return
    names: dict[State, str] = {
        "changed": "changed",
        "dtype": "of another type",
        "shape": "of another shape",
        "only_a": "only in A",
        "only_b": "only in B",
    }
    state_counts = [f"{counts[state]} {text}" for state, text in names.items() if counts[state]]
    total = _total(differences)
    relative_change = f"; relative change {_number(total.relative)}" if total else ""
    say(
        f"{counts['same']} of {len(differences)} tensors are the same,"
        f" {', '.join(state_counts)}{relative_change}"
    )
    groups = count_by_group(differences)
    if len(groups) > 1:
        rows = [_group_row(group) for group in groups]
        print()
        print("\n".join(output.aligned([["GROUP", "SAME", "OTHER", "RELATIVE", "LARGEST"], *rows])))
    shown = list(_top(differences, top))
    if shown:
        rows = [_row(d) for d in shown]
        heading = ["TENSOR", "", "RELATIVE", "LARGEST", "ELEMENTS"]
        print()
        print("\n".join(output.aligned([heading, *rows])))
    if hidden := len(differences) - counts["same"] - len(shown):
        say(f"and {hidden} more (--top N shows more)")


def _group_row(group: GroupDifferences) -> list[str]:
    """Return a group of layers as a row: its counts of equal and other tensors, its change."""
    same = group.counts.get("same", 0)
    return [
        group.group,
        str(same),
        str(sum(group.counts.values()) - same),
        *_numbers(group.change),
    ]


def _row(d: Difference) -> list[str]:
    """Return a differing tensor as a row; `NONE` stands for numbers if it was not read."""
    state = {"only_a": "only in A", "only_b": "only in B"}.get(d.state, d.state)
    if d.a and d.b and d.state == "dtype":
        state = f"{d.a.dtype} to {d.b.dtype}"
    if d.a and d.b and d.state == "shape":
        state = f"{_shape(d.a.shape)} to {_shape(d.b.shape)}"
    elements = NONE
    if d.change:
        elements = f"{d.change.differing} of {d.change.elements}"
        elements += f", {d.change.nonfinite} NaN or infinite" if d.change.nonfinite else ""
    return [d.name, state, *_numbers(d.change), elements]


def _shape(shape: Sequence[int]) -> str:
    """Return a shape as ``2x3``; "scalar" without dimensions."""
    return "x".join(map(str, shape)) or "scalar"


def _numbers(change: Distance | None) -> list[str]:
    """Return the relative and the largest change as cells; `NONE` twice for no change."""
    if change is None:
        return [NONE, NONE]
    return [_number(change.relative), _number(change.largest)]


def _number(value: float | None) -> str:
    """Return a number with four significant digits; `NONE` for no value."""
    return NONE if value is None else f"{value:.4g}"
