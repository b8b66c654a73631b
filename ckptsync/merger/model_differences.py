"""Compare two models tensor by tensor: which are the same, and how far the others lie apart.

Tensors whose recorded digests are equal are not read.  Of others with one shape both sides are made
as a merge makes them, and compared piece by piece, so memory does not grow with the models.  Bits
decide whether elements are equal, float64 how far they lie apart.  In order: `index_by_name`,
`compare_tensors`, `read_changes`, `count_by_group` or `most_changed`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, get_args

import numpy as np

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merger.cast import RAW, Array
from ckptsync.merger.engine import WeightsFile
from ckptsync.merger.plan import FilePlan, MergeResources, PlannedTensor
from ckptsync.merger.readers import planned_reader
from ckptsync.merger.tensor_statistics import INTEGERS, exact_values
from ckptsync.records.layer_groups import LAYER_GROUPS, LayerGroup, layer_group
from ckptsync.tensors import Copy, Extent, Files, Part

State = Literal["same", "changed", "dtype", "shape", "only_a", "only_b"]
STATES: tuple[State, ...] = get_args(State)
PIECE = 64 << 10  # elements whose wider copies stay in the cache
_WORK = MergeResources(jobs=1)  # of a side one unit is in memory


@dataclass(frozen=True, slots=True)
class Side:
    """One of two models: its tensors by name, and the files that their copies lie in.

    ``digests``: BLAKE3 of tensors' bytes, where a record has them.
    """

    tensors: Mapping[str, PlannedTensor]
    files: Files
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far ``elements`` of B lie from those of A.

    ``differing`` have other bits, ``nonfinite`` of these have no finite difference. ``squares`` and
    ``largest`` are of the others' differences; ``base``: the sum of squares of A's finite values.
    """

    elements: int = 0
    differing: int = 0
    nonfinite: int = 0
    squares: float = 0.0
    largest: float = 0
    base: float = 0.0

    def __add__(self, distance: Distance) -> Distance:
        return Distance(
            self.elements + distance.elements,
            self.differing + distance.differing,
            self.nonfinite + distance.nonfinite,
            self.squares + distance.squares,
            max(self.largest, distance.largest),
            self.base + distance.base,
        )

    @property
    def norm(self) -> float:
        """L2 of the differences."""
        return math.sqrt(self.squares)

    @property
    def relative(self) -> float | None:
        """`norm` by the norm of A's values; 0 without differences; None if it would be infinite."""
        if not self.squares:
            return 0.0
        ratio = self.squares / self.base if self.base else math.inf
        return math.sqrt(ratio) if 0 < ratio < math.inf else None


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor of A or B, or both, and what became of it; ``change`` is None if it was not read."""

    name: str
    state: State
    a: PlannedTensor | None
    b: PlannedTensor | None
    change: Distance | None = None


@dataclass(frozen=True, slots=True)
class GroupDifferences:
    """A group of layers: its tensors by state, and the change of those that were read."""

    group: LayerGroup
    counts: Mapping[State, int]
    change: Distance | None


def recorded_tensor(
    name: str, dtype: str, shape: tuple[int, ...], extent: Extent, file_size: int | None
) -> PlannedTensor:
    """Return the tensor that a record describes, as one that can be read.

    Raises Corrupt if its bytes cannot be what the record says.
    """
    is_whole = dtype in ITEMSIZE and extent.size == prod(shape) * ITEMSIZE[dtype]
    if not is_whole or file_size is None or extent.start + extent.size > file_size:
        raise Corrupt(
            f"{name}: its record does not fit its file, {extent.file}",
            hint="`ckptsync verify` the checkpoint",
        )
    part = Part((0,) * len(shape), shape, extent)
    return PlannedTensor(name, dtype, shape, extent.start, extent.size, Copy(dtype, shape, (part,)))


def index_by_name(tensors: Iterable[tuple[str, PlannedTensor]]) -> dict[str, PlannedTensor]:
    """Return tensors by name; of an adapter, the name begins with the directory of its file.

    ``tensors``: the name of a file, and a tensor in it.  Raises Corrupt if two have one name.
    """
    result: dict[str, PlannedTensor] = {}
    for file, tensor in tensors:
        directory, slash, _ = file.rpartition("/")
        name = f"{directory}{slash}{tensor.name}"
        if name in result:
            raise Corrupt(f"{name}: two tensors have this name")
        result[name] = tensor
    return result


def planned_side(plans: Iterable[FilePlan], files: Files) -> Side:
    """Return the tensors that a merge would write, without digests; ``files`` holds their bytes.

    Raises Corrupt if two tensors have one name.
    """
    return Side(
        index_by_name((plan.name, tensor) for plan in plans for tensor in plan.tensors), files, {}
    )


def compare_tensors(a: Side, b: Side) -> tuple[Difference, ...]:
    """Return every tensor with what names, types, shapes and digests say, in A's order, then B's.

    The state is "changed" if only the bytes can decide, until they are read.
    """
    return tuple(
        Difference(name, _initial_state(name, a, b), a.tensors.get(name), b.tensors.get(name))
        for name in dict.fromkeys((*a.tensors, *b.tensors))
    )


def _initial_state(name: str, a: Side, b: Side) -> State:
    """Return the state of a tensor as `compare_tensors` says."""
    first, second = a.tensors.get(name), b.tensors.get(name)
    if first is None or second is None:
        return "only_b" if first is None else "only_a"
    if first.shape != second.shape:
        return "shape"
    if first.dtype != second.dtype:
        return "dtype"
    digest = a.digests.get(name)
    is_same = not prod(first.shape) or (digest and digest == b.digests.get(name))
    return "same" if is_same else "changed"


def bytes_to_read(differences: Iterable[Difference]) -> int:
    """Return how many bytes of both sides `read_changes` compares."""
    return sum(d.a.size + d.b.size for d in differences if _is_read(d) and d.a and d.b)


def _is_read(difference: Difference) -> bool:
    """Return whether the bytes of both sides are compared."""
    return difference.state in ("changed", "dtype")


def read_changes(
    a: Side, b: Side, differences: Sequence[Difference], progress: Callable[[int], None]
) -> tuple[tuple[Difference, ...], tuple[str, ...]]:
    """Return the differences with the changes that the bytes show, and notes for the user.

    ``progress`` gets each number of bytes that were read.  Raises Corrupt if bytes do not have
    their recorded digest, and what reading raises.
    """
    names = [d.name for d in differences if _is_read(d)]
    if not names:
        return tuple(differences), ()
    changes: dict[str, Distance] = {}
    streams = [_Stream(side, names, progress) for side in (a, b)]
    with contextlib.closing(streams[0].bytes), contextlib.closing(streams[1].bytes):
        for name in names:
            dtypes = a.tensors[name].dtype, b.tensors[name].dtype
            total, remaining = Distance(), prod(a.tensors[name].shape)
            while remaining:
                count = min(remaining, PIECE)
                pieces = [
                    stream.take(count * ITEMSIZE[dtype])
                    for stream, dtype in zip(streams, dtypes, strict=True)
                ]
                total += measure(pieces[0], dtypes[0], pieces[1], dtypes[1])
                remaining -= count
            changes[name] = total
        notes = [note for stream in streams for note in stream.finish()]
    return tuple(_with_change(d, changes.get(d.name)) for d in differences), tuple(notes)


def _with_change(difference: Difference, change: Distance | None) -> Difference:
    """Return a difference with its change; without differing elements its state becomes "same"."""
    if change is None:
        return difference
    is_same = difference.state == "changed" and not change.differing
    return replace(difference, state="same" if is_same else difference.state, change=change)


class _Stream:
    """The bytes of some tensors of a side, one after the other, as a merge would write them."""

    def __init__(self, side: Side, names: Sequence[str], progress: Callable[[int], None]) -> None:
        self._side, self._names = side, names
        plan = FilePlan("", b"", tuple(side.tensors[name] for name in names))
        reader, self._crcs = planned_reader(side.files, (plan,), plan.checksums)
        work = replace(_WORK, tensor_digests=bool(side.digests))
        self._file = WeightsFile(plan, reader, progress, work)
        self.bytes: Generator[memoryview, None, None] = self._file.chunks()
        self._chunk = memoryview(b"")

    def take(self, size: int) -> Array:
        """Read and return the next ``size`` bytes, which must exist; raise what the files raise."""
        out: Array = np.empty(size, "u1")
        filled = 0
        while filled < size:
            if not self._chunk:
                self._chunk = next(self.bytes)
            count = min(len(self._chunk), size - filled)
            out.data[filled : filled + count] = self._chunk[:count]
            self._chunk, filled = self._chunk[count:], filled + count
        return out

    def finish(self) -> tuple[str, ...]:
        """Check the bytes against the digests of containers and records; return the merge's notes.

        Call it after the last `take`.  Reads what nobody has read of the containers' records.
        Raises Corrupt if a digest differs.
        """
        for _ in self.bytes:  # the digests are made when the stream has ended
            pass
        self._crcs.finish()
        result = self._file.result()
        for name, tensor in zip(self._names, result.tensors, strict=True):
            if self._side.digests.get(name, tensor.digest) != tensor.digest:
                raise Corrupt(
                    f"{name}: its bytes are not those that were recorded",
                    hint="`ckptsync verify` finds what is damaged, `ckptsync repair` repairs it",
                )
        return result.notes


def measure(a: Array, dtype_a: str, b: Array, dtype_b: str) -> Distance:
    """Return how far the elements in these bytes lie apart.

    Elements of one type are equal if their bits are (NaN equals the same NaN, 0 is not -0);
    elements of two types, if their values are.
    """
    with np.errstate(all="ignore"):
        first = exact_values(a, dtype_a)
        if dtype_a != dtype_b:
            first, second = _widen(first), _widen(exact_values(b, dtype_b))
            differs: Array = (first != second) & ~(np.isnan(first) & np.isnan(second))
            apart = np.abs(second - first)
        else:
            words = RAW[ITEMSIZE[dtype_a]]
            differs = a.view(words) != b.view(words)
            if not differs.any():
                return Distance(elements=len(first), base=_sum_squares(first))
            second = exact_values(b, dtype_b)
            if dtype_a in INTEGERS:  # exact, also where float64 is not
                unsigned = f"u{first.dtype.itemsize}"
                high, low = np.maximum(first, second), np.minimum(first, second)
                apart = high.view(unsigned) - low.view(unsigned)
            else:
                apart = np.abs(_widen(second) - _widen(first))
        differing = int(np.count_nonzero(differs))
        finite = apart[differs]
        if finite.dtype.kind == "f":
            finite = finite[np.isfinite(finite)]
        largest = finite.max().item() if len(finite) else 0
        return Distance(
            len(first),
            differing,
            differing - len(finite),
            _sum_squares(finite),
            largest,
            _sum_squares(first),
        )


def _widen(values: Array) -> Array:
    """Return values as float64, or complex numbers as two of them."""
    return values.astype("<c16" if values.dtype.kind == "c" else "<f8")


def _sum_squares(values: Array) -> float:
    """Return the sum of squares of the finite values."""
    wide = np.abs(_widen(values)) if values.dtype.kind == "c" else _widen(values)
    total = float(wide.dot(wide))
    if math.isfinite(total):
        return total
    finite = wide[np.isfinite(wide)]
    return float(finite.dot(finite))


def count_by_group(differences: Iterable[Difference]) -> tuple[GroupDifferences, ...]:
    """Return the differences by group, in the order of `LAYER_GROUPS`, without empty groups."""
    counts: dict[LayerGroup, dict[State, int]] = {}
    changes: dict[LayerGroup, Distance] = {}
    for d in differences:
        group = layer_group(d.name)
        states = counts.setdefault(group, {})
        states[d.state] = states.get(d.state, 0) + 1
        if d.change and d.state != "same":
            changes[group] = changes.get(group, Distance()) + d.change
    return tuple(
        GroupDifferences(group, counts[group], changes.get(group))
        for group in LAYER_GROUPS
        if group in counts
    )


def most_changed(differences: Iterable[Difference]) -> list[Difference]:
    """Return the tensors that are not the same, the largest relative change first.

    Other shapes come first, then tensors with NaN or infinity on one side; tensors that were not
    read, and then those of only one side, come last.
    """
    rank = {"shape": 0, "dtype": 1, "changed": 1, "only_a": 2, "only_b": 3}

    def key(d: Difference) -> tuple[int, bool, float]:
        """Return the place of a difference in that order."""
        change = d.change or Distance()
        relative = math.inf if change.relative is None else change.relative
        return rank[d.state], not change.nonfinite, -relative

    return sorted((d for d in differences if d.state != "same"), key=key)
