"""How far two tensors lie apart, by the slow way; and what needs no bytes to be said."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from ckptsync.errors import Corrupt
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.merger.model_differences import (
    PIECE,
    Difference,
    Distance,
    Side,
    State,
    bytes_to_read,
    compare_tensors,
    count_by_group,
    index_by_name,
    measure,
    most_changed,
    read_changes,
    recorded_tensor,
)
from ckptsync.merger.plan import PlannedTensor
from ckptsync.tensors import Extent, MemoryFiles

NAN, INF = math.nan, math.inf


def raw(dtype: str, *values: float) -> np.ndarray:
    if dtype == "BF16":
        return (np.array(values, "<f4").view("<u4") >> 16).astype("<u2").view("u1")
    if dtype.startswith("F8"):  # by their codes
        return np.array(values, "u1")
    kind = {"F": "f", "I": "i", "U": "u", "B": "u", "C": "c"}[dtype[0]]
    return np.array(values, f"<{kind}{ITEMSIZE[dtype]}").view("u1")


def apart(differing: int, *differences: float, base: float, nonfinite: int = 0) -> Distance:
    """A change of two elements by these differences."""
    squares = float(sum(Fraction(d) ** 2 for d in differences))
    return Distance(2, differing, nonfinite, squares, max(differences, default=0), base)


@pytest.mark.parametrize(
    ("dtype", "a", "b", "change"),
    [
        ("F32", (1.0, -2.0), (1.0, -2.0), apart(0, base=5.0)),
        ("F32", (1.0, -2.0), (1.0, -2.5), apart(1, 0.5, base=5.0)),
        ("F64", (1.0, 1 / 3), (1.0, 1 / 3 + 2**-54), apart(1, 2**-54, base=1 + 1 / 9)),
        ("F16", (1.0, 65504.0), (2.0, -65504.0), apart(2, 1.0, 131008.0, base=1 + 65504.0**2)),
        ("BF16", (1.0, 2.0), (1.0, 1.0), apart(1, 1.0, base=5.0)),
        ("BF16", (NAN, 2.0), (NAN, 1.0), apart(1, 1.0, base=4.0)),
        ("BF16", (NAN, 2.0), (1.0, 2.0), apart(1, base=4.0, nonfinite=1)),
        ("BF16", (0.0, 2.0), (-0.0, 2.0), apart(1, 0.0, base=4.0)),
        ("F32", (INF, 2.0), (INF, 2.0), apart(0, base=4.0)),
        ("F32", (INF, 2.0), (-INF, 1.0), apart(2, 1.0, base=4.0, nonfinite=1)),
        ("F32", (3e38, 1.0), (-3e38, 1.0), apart(1, 2 * float(np.float32(3e38)),
                                                 base=float(np.float32(3e38)) ** 2 + 1)),
        ("F8_E4M3", (0x38, 0x40), (0x38, 0x38), apart(1, 1.0, base=5.0)),
        ("F8_E4M3", (0x7F, 0x40), (0x7F, 0x40), apart(0, base=4.0)),
        ("F8_E5M2", (0x3C, 0x7C), (0x40, 0x7C), apart(1, 1.0, base=1.0)),
        ("I8", (-128, 1), (127, 1), apart(1, 255, base=128.0**2 + 1)),
        ("U8", (1, 255), (1, 0), apart(1, 255, base=1 + 255.0**2)),
        ("BOOL", (1, 0), (1, 1), apart(1, 1, base=1.0)),
        ("I64", (2**62, 5), (2**62 + 1, 5), apart(1, 1, base=float(2**124))),
        ("U64", (0, 5), (2**64 - 1, 5), apart(1, 2**64 - 1, base=25.0)),
        ("C64", (3 + 4j, 1), (0, 1), apart(1, 5.0, base=26.0)),
    ],
)  # fmt: skip
def test_elements_lie_apart_by_their_values_and_are_equal_by_their_bits(
    dtype: str, a: tuple[float, ...], b: tuple[float, ...], change: Distance
) -> None:
    result = measure(raw(dtype, *a), dtype, raw(dtype, *b), dtype)
    assert (result.elements, result.differing, result.nonfinite, result.largest) == (
        change.elements, change.differing, change.nonfinite, change.largest
    )  # fmt: skip
    assert result.squares == pytest.approx(change.squares, rel=1e-12)
    assert result.base == pytest.approx(change.base, rel=1e-12)


def test_elements_of_two_types_are_compared_by_their_values() -> None:
    a, b = raw("BF16", 1.0, 2.0, NAN, 0.0), raw("F32", 1.0, 2.5, NAN, -0.0)
    result = measure(a, "BF16", b, "F32")
    assert (result.differing, result.nonfinite, result.largest) == (1, 0, 0.5)


@pytest.mark.parametrize(
    ("change", "relative"),
    [
        (Distance(), 0.0),
        (Distance(4, 2, 0, 0.25, 0.5, 25.0), 0.1),
        (Distance(4, 2, 0, 0.25, 0.5, 0.0), None),
        (Distance(4, 2, 0, 0.25, 0.5, math.inf), None),
        (Distance(4, 2, 0, math.inf, 0.5, 1.0), None),
    ],
)
def test_a_relative_change_is_a_number_or_none(change: Distance, relative: float | None) -> None:
    assert change.relative == relative


def side(tensors: dict[str, np.ndarray], digests: dict[str, str] | None = None) -> Side:
    """A model of F32 tensors in one file."""
    planned, data = {}, b""
    for name, values in tensors.items():
        extent = Extent("f", len(data), values.nbytes)
        data += values.astype("<f4").tobytes()
        planned[name] = recorded_tensor(name, "F32", values.shape, extent, len(data))
    return Side(planned, MemoryFiles({"f": data}), digests or {})


def states(differences: tuple[Difference, ...]) -> dict[str, State]:
    return {d.name: d.state for d in differences}


ONES, TWO = np.ones((2, 3), "f4"), np.full((2, 3), 2, "f4")


def test_what_names_shapes_and_digests_show_needs_no_reading() -> None:
    a = side({"x": ONES, "y": ONES, "z": ONES, "a": ONES, "e": ONES[:0]}, {"x": "1", "y": "2"})
    b = side({"x": ONES, "y": TWO, "z": ONES[:1], "b": ONES, "e": ONES[:0]}, {"x": "1", "y": "3"})
    found = compare_tensors(a, b)
    assert states(found) == {"x": "same", "y": "changed", "z": "shape", "a": "only_a", "e": "same",
                             "b": "only_b"}  # fmt: skip
    assert bytes_to_read(found) == 2 * ONES.nbytes


def test_bytes_decide_where_digests_are_missing_and_damage_is_not_taken_for_a_change() -> None:
    a, b = side({"x": ONES, "y": ONES}), side({"x": ONES, "y": TWO}, {"x": "1", "y": "2"})
    counted: list[int] = []
    with pytest.raises(Corrupt, match="x: its bytes are not those that were recorded"):
        read_changes(a, b, compare_tensors(a, b), counted.append)
    b = side({"x": ONES, "y": TWO})
    found, notes = read_changes(a, b, compare_tensors(a, b), counted.append)
    assert (states(found), notes) == ({"x": "same", "y": "changed"}, ())
    change = found[1].change
    assert change
    assert (change.relative, change.largest, change.differing) == (1.0, 1, 6)


def test_tensors_of_many_pieces_and_odd_sizes_are_compared_whole() -> None:
    dice = np.random.default_rng(1)
    sizes = {"a": 3, "b": 2 * PIECE + 7, "c": 1, "d": PIECE}
    own = {name: dice.standard_normal(n, "f4") for name, n in sizes.items()}
    other = {name: values.copy() for name, values in own.items()}
    other["b"][-1] += 1
    other["b"][5] -= 2
    a, b = side(own), side(dict(reversed(other.items())))
    found, _ = read_changes(a, b, compare_tensors(a, b), lambda _size: None)
    assert [name for name, state in states(found).items() if state != "same"] == ["b"]
    change = next(d.change for d in found if d.name == "b")
    assert change
    exact = np.linalg.norm(other["b"].astype("f8") - own["b"]) / np.linalg.norm(
        own["b"].astype("f8")
    )
    assert change.relative == pytest.approx(exact, rel=1e-12)
    assert (change.elements, change.differing) == (sizes["b"], 2)


@pytest.mark.parametrize(
    ("dtype", "shape", "extent", "size"),
    [
        ("F32", (2,), Extent("f", 0, 4), 100),
        ("F32", (2,), Extent("f", 96, 8), 100),
        ("F32", (2,), Extent("f", 0, 8), None),
        ("F5", (2,), Extent("f", 0, 8), 100),
    ],
)
def test_a_record_that_does_not_fit_its_file_is_corrupt(
    dtype: str, shape: tuple[int, ...], extent: Extent, size: int | None
) -> None:
    with pytest.raises(Corrupt, match="x: its record does not fit its file, f"):
        recorded_tensor("x", dtype, shape, extent, size)


def planned(name: str) -> PlannedTensor:
    return recorded_tensor(name, "F32", (1,), Extent("f", 0, 4), 4)


def test_adapters_in_directories_are_told_apart() -> None:
    one = planned("x")
    assert [*index_by_name([("m.safetensors", one), ("other/m.safetensors", one)])] == [
        "x",
        "other/x",
    ]
    with pytest.raises(Corrupt, match="x: two tensors have this name"):
        index_by_name([("m-1.safetensors", one), ("m-2.safetensors", one)])


def test_the_most_changed_comes_first_and_groups_sum_up_what_changed() -> None:
    def one(name: str, state: State, change: Distance | None = None) -> Difference:
        return Difference(name, state, planned(name), planned(name), change)

    found = [
        one("a.mlp.x", "only_b"),
        one("b.mlp.x", "changed", Distance(4, 1, 0, 1.0, 1.0, 4.0)),
        one("c.mlp.x", "same", Distance(4, 0, 0, 0.0, 0, 400.0)),
        one("d.mlp.x", "changed", Distance(4, 1, 0, 9.0, 3.0, 12.0)),
        one("e.norm", "changed", Distance(4, 1, 1, 0.0, 0, 4.0)),
        one("f.norm", "changed", Distance(4, 1, 0, 1.0, 1.0, 0.0)),
        one("g.norm", "only_a"),
        one("h.norm", "shape"),
        one("i.norm", "dtype"),
    ]
    assert "".join(d.name[0] for d in most_changed(found)) == "hefdbiga"
    mlp, norm = count_by_group(found)
    assert (mlp.group, dict(mlp.counts)) == ("mlp", {"only_b": 1, "changed": 2, "same": 1})
    assert mlp.change == Distance(8, 2, 0, 10.0, 3.0, 16.0)
    assert (norm.group, sum(norm.counts.values())) == ("norm", 5)
