"""The record of the values of a consolidated model: what its merge counted of each tensor.

It lies beside the model record and not within it: sums of floating-point numbers differ in their
last digits between processors, and model records of two heads must be equal.  It is of every model
record that has the same tensors, also of one that only adds configuration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot

from ckptsync.digest import digest
from ckptsync.records.layer_groups import LAYER_GROUPS, LayerGroup, layer_group
from ckptsync.records.model_record import ModelTensor
from ckptsync.records.store_paths import FORMAT
from ckptsync.typed_json import Count, FormatNumber

MOST_NAMES = 8  # tensors that a finding names
MOST_FINDINGS = 20  # of a record that are shown
MOST_TEXT = 1000  # characters of a finding's text, or of a name in it, that are shown

TensorValues = tuple[Count, Count, Count, float | None, float | None, float | None]
"""NaNs, infinities, zeros; least and greatest finite value; norm (L2) of the finite values.

None where there is no such number: integers have no norm.  To six digits: so a row has at most 100
bytes.
"""


@dataclass(frozen=True, slots=True)
class WeightsFinding:
    """Something that looks wrong in the weights of a model, see `weights_findings`.

    ``kind``: ``same``, ``unchanged``, ``nonfinite``, ``zero``, ``jump``, ``lora`` or ``smaller``.
    ``text``: a sentence; ``tensors``: of how many it speaks, ``first``: names of some of them.
    """

    kind: str
    text: str
    tensors: Count = 0
    first: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Return the sentence with the names."""
        more = ", …" if self.tensors > len(self.first) else ""
        return f"{self.text} ({', '.join(self.first)}{more})" if self.first else self.text


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """``of``: `tensors_digest` of the model; ``values``: of each of its tensors, in their order.

    None of a tensor whose type has no statistics.

    ``findings``: what looks wrong, beside the models before it in its run; ``compared``: their
    locations, the last first; None in a record of ckptsync 1.0, which looks for nothing.  A further
    record of a model, which is written when a model before it is made later, has no ``values``.
    """

    run: str
    checkpoint: str
    location: str
    n: Count
    of: str
    values: tuple[TensorValues | None, ...]
    findings: tuple[WeightsFinding, ...] = ()
    compared: tuple[str, ...] | None = None
    format: FormatNumber = FORMAT


@dataclass(frozen=True, slots=True)
class GroupValues:
    """What is known of the tensors of a group of layers; ``size``: their elements.

    ``norm``: None if none of them has one.
    """

    group: LayerGroup
    tensors: int
    size: int
    norm: float | None
    low: float | None
    high: float | None
    zeros: int
    nans: int
    infinities: int


@dataclass(frozen=True, slots=True)
class ModelValues:
    """The values of a model by group, in the order of `LAYER_GROUPS`.

    ``nonfinite``: how many tensors hold NaN or infinity, ``first``: names of some of them;
    ``uncounted``: tensors of which nothing is known; ``findings``: what looks wrong.
    """

    groups: tuple[GroupValues, ...]
    nonfinite: int = 0
    first: tuple[str, ...] = ()
    uncounted: int = 0
    findings: tuple[WeightsFinding, ...] = ()


def tensors_digest(tensors: Iterable[ModelTensor]) -> str:
    """Return the digest of a model's tensors: of their names, types, shapes and digests."""
    lines = (f"{t.name!r} {t.dtype} {list(t.shape)} {t.digest}\n" for t in tensors)
    return digest("".join(lines).encode())


def rounded(value: float | None) -> float | None:
    """Return a value to six digits; None of what JSON has no number for."""
    if value is None or not -_MOST <= value <= _MOST:
        return None
    return float(f"{value:.6g}")


_MOST = 1.79769e308  # float64's, to six digits
_LARGEST = 2**63 - 1  # of a whole number in a record, and in what is made of it


def find_values(
    tensors: Sequence[ModelTensor], records: Mapping[str, WeightsRecord]
) -> ModelValues | None:
    """Return the values of a model by the first of these records that is of its tensors.

    A record that counts more values than a tensor has is none: whoever may write to a store may
    write one.
    """
    its = records_of(tensors, records)
    values = first_values(tensors, its)
    if values is None:
        return None
    grouped = group_values(tensors, values)
    findings = last_findings(its)
    if findings is None:  # nobody has looked
        pairs = zip(tensors, values, strict=True)
        odd = [t.name for t, v in pairs if v and holds_nonfinite(t.name, v)]
        findings = (nonfinite_finding(odd),) if odd else ()
    return replace(grouped, findings=findings) if findings else grouped


def records_of(
    tensors: Sequence[ModelTensor], records: Mapping[str, WeightsRecord]
) -> tuple[WeightsRecord, ...]:
    """Return those of these records that are of a model's tensors, by name."""
    own = tensors_digest(tensors) if records else ""
    return tuple(record for _, record in sorted(records.items()) if record.of == own)


def first_values(
    tensors: Sequence[ModelTensor], records: Iterable[WeightsRecord]
) -> tuple[TensorValues | None, ...] | None:
    """Return the values in the first of a model's records that can have them."""
    return next((record.values for record in records if _can_be(tensors, record.values)), None)


def last_findings(records: Iterable[WeightsRecord]) -> tuple[WeightsFinding, ...] | None:
    """Return what the last of a model's records has found; None if none has looked."""
    looked = [record for record in records if record.compared is not None]
    if not looked:
        return None
    return tuple(_shortened(f) for f in max(looked, key=lambda r: r.n).findings[:MOST_FINDINGS])


def _shortened(finding: WeightsFinding) -> WeightsFinding:
    """Return a finding of a length that can be shown, whoever has written it."""
    first = tuple(name[:MOST_TEXT] for name in finding.first[:MOST_NAMES])
    return replace(finding, text=finding.text[:MOST_TEXT], first=first)


def holds_nonfinite(name: str, values: TensorValues) -> bool:
    """Return whether a tensor holds NaN or infinity, and is no mask.

    A mask has no NaN; it is called one, or is added to numbers: its values are zero and infinity.
    """
    nans, infinities, zeros, low, high, _ = values
    is_mask = bool(zeros and low == high == 0) or "mask" in name.rpartition(".")[2].lower()
    return nans > 0 or (infinities > 0 and not is_mask)


def nonfinite_finding(names: Sequence[str]) -> WeightsFinding:
    """Return the finding that these tensors hold NaN or infinity."""
    who = "1 tensor holds" if len(names) == 1 else f"{len(names)} tensors hold"
    first = tuple(names[:MOST_NAMES])
    return WeightsFinding("nonfinite", f"{who} NaN or infinity", len(names), first)


def _can_be(tensors: Sequence[ModelTensor], values: Sequence[TensorValues | None]) -> bool:
    """Return whether these may be the values of these tensors, by their counts."""
    if len(values) != len(tensors):
        return False
    sizes = [elements(tensor) for tensor in tensors]
    return sum(sizes) < _LARGEST and all(
        v is None or sum(v[:3]) <= size for v, size in zip(values, sizes, strict=True)
    )


def elements(tensor: ModelTensor) -> int:
    """Return how many elements a tensor has, at most what a record's number may be."""
    count = 1
    for length in tensor.shape:
        count = min(count * length, _LARGEST)
    return count


def group_values(
    tensors: Sequence[ModelTensor], values: Sequence[TensorValues | None]
) -> ModelValues:
    """Return the values of tensors by group."""
    groups: dict[LayerGroup, list[tuple[ModelTensor, TensorValues]]] = {}
    nonfinite = []
    for tensor, its in zip(tensors, values, strict=True):
        if its is None:
            continue
        groups.setdefault(layer_group(tensor.name), []).append((tensor, its))
        if its[0] or its[1]:
            nonfinite.append(tensor.name)
    counted = [_combined(group, groups[group]) for group in LAYER_GROUPS if group in groups]
    first = tuple(nonfinite[:MOST_NAMES])
    uncounted = sum(its is None for its in values)
    return ModelValues(tuple(counted), len(nonfinite), first, uncounted)


def _combined(group: LayerGroup, its: Sequence[tuple[ModelTensor, TensorValues]]) -> GroupValues:
    lows = [low for _, (_, _, _, low, _, _) in its if low is not None]
    highs = [high for _, (_, _, _, _, high, _) in its if high is not None]
    norms = [norm for _, (*_, norm) in its if norm is not None]
    return GroupValues(
        group=group,
        tensors=len(its),
        size=sum(elements(tensor) for tensor, _ in its),
        norm=rounded(hypot(*norms)) if norms else None,
        low=rounded(min(lows, default=None)),
        high=rounded(max(highs, default=None)),
        zeros=sum(zeros for _, (_, _, zeros, _, _, _) in its),
        nans=sum(nans for _, (nans, _, _, _, _, _) in its),
        infinities=sum(infinities for _, (_, infinities, _, _, _, _) in its),
    )
