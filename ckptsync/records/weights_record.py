"""The record of a model's values: what its merge counted of each tensor, and what looks wrong.

Sums of floating-point numbers differ in their last digits between processors, and the model records
of two heads must be equal. So the values lie beside the model record, in a record of their own. It
belongs to every model record that has the same tensors (`tensors_digest`), also to one that only
adds configuration.
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
    ``text``: a sentence; ``tensors``: how many it is about, ``first``: names of some of them.
    """

    kind: str
    text: str
    tensors: Count = 0
    first: tuple[str, ...] = ()

    @property
    def line(self) -> str:
        """Return the sentence, with the first names in parentheses if there are any."""
        more = ", …" if self.tensors > len(self.first) else ""
        return f"{self.text} ({', '.join(self.first)}{more})" if self.first else self.text


@dataclass(frozen=True, slots=True)
class WeightsRecord:
    """The values of a model's tensors, and the findings about them.

    ``of``: `tensors_digest` of the model; ``values``: one for each of its tensors, in their order;
    None for a tensor whose type has no statistics. ``compared``: the locations of the models that
    it was compared with, the last first; None in a record of ckptsync 1.0, which finds nothing. A
    further record of a model, written when a model before it is made later, has no ``values``.
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
    """The values of the tensors of one group of layers; ``size``: how many elements they have.

    ``norm`` is None if no tensor has one.
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
    """The values of a model by group of layers, in the order of `LAYER_GROUPS`.

    ``nonfinite``: how many tensors hold NaN or infinity, ``first``: names of some of them;
    ``uncounted``: how many tensors have no values; ``findings``: what looks wrong.
    """

    groups: tuple[GroupValues, ...]
    nonfinite: int = 0
    first: tuple[str, ...] = ()
    uncounted: int = 0
    findings: tuple[WeightsFinding, ...] = ()


def tensors_digest(tensors: Iterable[ModelTensor]) -> str:
    """Return one digest of the names, types, shapes and digests of a model's tensors."""
    lines = (f"{t.name!r} {t.dtype} {list(t.shape)} {t.digest}\n" for t in tensors)
    return digest("".join(lines).encode())


def rounded(value: float | None) -> float | None:
    """Return a value to six digits; None for None, NaN, infinity, and what rounds to infinity."""
    if value is None or not -_MOST <= value <= _MOST:
        return None
    return float(f"{value:.6g}")


_MOST = 1.79769e308  # float64's, to six digits
_LARGEST = 2**63 - 1  # of a whole number in a record, and in what is made of it


def find_values(
    tensors: Sequence[ModelTensor], records: Mapping[str, WeightsRecord]
) -> ModelValues | None:
    """Return a model's values and findings by its records; None if no record has its values.

    A record that counts more values than a tensor has elements is ignored: anybody who may write to
    a store may write one. If no record compared the model, the one finding possible is `nonfinite`.
    """
    own_records = records_of(tensors, records)
    values = first_values(tensors, own_records)
    if values is None:
        return None
    grouped = group_values(tensors, values)
    findings = last_findings(own_records)
    if findings is None:  # nobody has looked
        pairs = zip(tensors, values, strict=True)
        nonfinite = [t.name for t, v in pairs if v and holds_nonfinite(t.name, v)]
        findings = (nonfinite_finding(nonfinite),) if nonfinite else ()
    return replace(grouped, findings=findings) if findings else grouped


def records_of(
    tensors: Sequence[ModelTensor], records: Mapping[str, WeightsRecord]
) -> tuple[WeightsRecord, ...]:
    """Return the records whose ``of`` is the `tensors_digest` of these tensors, sorted by name."""
    own_digest = tensors_digest(tensors) if records else ""
    return tuple(record for _, record in sorted(records.items()) if record.of == own_digest)


def first_values(
    tensors: Sequence[ModelTensor], records: Iterable[WeightsRecord]
) -> tuple[TensorValues | None, ...] | None:
    """Return the values of the first record whose values may be of these tensors; None if none."""
    return next(
        (record.values for record in records if _may_be_values_of(tensors, record.values)), None
    )


def last_findings(records: Iterable[WeightsRecord]) -> tuple[WeightsFinding, ...] | None:
    """Return the findings of the record with the highest number that compared; None if none did.

    At most `MOST_FINDINGS` are returned, with texts and names cut to `MOST_TEXT` characters.
    """
    with_findings = [record for record in records if record.compared is not None]
    if not with_findings:
        return None
    return tuple(
        _shorten(f) for f in max(with_findings, key=lambda r: r.n).findings[:MOST_FINDINGS]
    )


def _shorten(finding: WeightsFinding) -> WeightsFinding:
    """Return a finding with a text and names of limited length, whoever wrote it."""
    first = tuple(name[:MOST_TEXT] for name in finding.first[:MOST_NAMES])
    return replace(finding, text=finding.text[:MOST_TEXT], first=first)


def holds_nonfinite(name: str, values: TensorValues) -> bool:
    """Return whether a tensor holds NaN, or infinity without being a mask.

    A tensor is a mask if the last part of its name has `mask`, or its finite values are all zero.
    """
    nans, infinities, zeros, low, high, _ = values
    is_mask = bool(zeros and low == high == 0) or "mask" in name.rpartition(".")[2].lower()
    return nans > 0 or (infinities > 0 and not is_mask)


def nonfinite_finding(names: Sequence[str]) -> WeightsFinding:
    """Return the finding that these tensors hold NaN or infinity."""
    who = "1 tensor holds" if len(names) == 1 else f"{len(names)} tensors hold"
    first = tuple(names[:MOST_NAMES])
    return WeightsFinding("nonfinite", f"{who} NaN or infinity", len(names), first)


def _may_be_values_of(
    tensors: Sequence[ModelTensor], values: Sequence[TensorValues | None]
) -> bool:
    """Return whether ``values`` may be of ``tensors``: as many, and no more counted than elements.

    False also if the tensors have `_LARGEST` elements or more.
    """
    if len(values) != len(tensors):
        return False
    sizes = [elements(tensor) for tensor in tensors]
    return sum(sizes) < _LARGEST and all(
        v is None or sum(v[:3]) <= size for v, size in zip(values, sizes, strict=True)
    )


def elements(tensor: ModelTensor) -> int:
    """Return how many elements a tensor has, at most `_LARGEST`."""
    count = 1
    for length in tensor.shape:
        count = min(count * length, _LARGEST)
    return count


def group_values(
    tensors: Sequence[ModelTensor], values: Sequence[TensorValues | None]
) -> ModelValues:
    """Return the values of a model's tensors by group of layers, without findings.

    Tensors without values are counted in ``uncounted`` alone. ``values`` are in the order of
    ``tensors``.
    """
    groups: dict[LayerGroup, list[tuple[ModelTensor, TensorValues]]] = {}
    nonfinite = []
    for tensor, tensor_values in zip(tensors, values, strict=True):
        if tensor_values is None:
            continue
        groups.setdefault(layer_group(tensor.name), []).append((tensor, tensor_values))
        if tensor_values[0] or tensor_values[1]:
            nonfinite.append(tensor.name)
    group_list = [_combine_group(group, groups[group]) for group in LAYER_GROUPS if group in groups]
    first = tuple(nonfinite[:MOST_NAMES])
    uncounted = sum(tensor_values is None for tensor_values in values)
    return ModelValues(tuple(group_list), len(nonfinite), first, uncounted)


def _combine_group(
    group: LayerGroup, pairs: Sequence[tuple[ModelTensor, TensorValues]]
) -> GroupValues:
    """Return the sums, extremes and norm of a group's tensors, None where no tensor has any."""
    lows = [low for _, (_, _, _, low, _, _) in pairs if low is not None]
    highs = [high for _, (_, _, _, _, high, _) in pairs if high is not None]
    norms = [norm for _, (*_, norm) in pairs if norm is not None]
    return GroupValues(
        group=group,
        tensors=len(pairs),
        size=sum(elements(tensor) for tensor, _ in pairs),
        norm=rounded(hypot(*norms)) if norms else None,
        low=rounded(min(lows, default=None)),
        high=rounded(max(highs, default=None)),
        zeros=sum(zeros for _, (_, _, zeros, _, _, _) in pairs),
        nans=sum(nans for _, (nans, _, _, _, _, _) in pairs),
        infinities=sum(infinities for _, (_, infinities, _, _, _, _) in pairs),
    )
