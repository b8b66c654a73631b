"""Which file holds what, which copy is taken, and in which element type."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.formats.dtypes import ITEMSIZE
from ckptsync.formats.safetensors import tensors as header_of
from ckptsync.merge.plan import DTYPES, DType, Options, check_dtype, choose, plan, target
from ckptsync.model import Copy, Extent, Part, Shape, Tensor
from tests.plain_files import MemoryFiles


def copy(dtype: str, shape: Shape = (2,), file: str = "f") -> Copy:
    return Copy(dtype, shape, (Part((0,) * len(shape), shape, Extent(file, 0, prod(shape) * ITEMSIZE[dtype])),))


def tensor(name: str, dtype: str = "F32", *copies: str, shape: Shape = (2,)) -> Tensor:
    return Tensor(name, dtype, shape, tuple(copy(c, shape, c) for c in copies or (dtype,)))


def split(sizes: dict[str, int], most: int) -> list[list[str]]:
    found = plan([tensor(name, "U8", shape=(size,)) for name, size in sizes.items()], Options(max_shard_size=most))
    return [[t.name for t in file.tensors] for file in found]


def as_huggingface_hub(sizes: dict[str, int], most: int) -> list[list[str]]:
    """`split_state_dict_into_shards_factory` of huggingface_hub, for tensors none of which is above ``most``."""
    files: list[list[str]] = []
    current: list[str] = []
    held = 0
    for name, size in sizes.items():
        if held + size > most:
            files.append(current)
            current, held = [], 0
        current.append(name)
        held += size
    return [*files, current]


@given(st.dictionaries(st.text("abc", min_size=1), st.integers(0, 20), min_size=1, max_size=20), st.integers(20, 60))
def test_tensors_are_split_as_huggingface_hub_splits_them(sizes: dict[str, int], most: int) -> None:
    assert split(sizes, most) == as_huggingface_hub(sizes, most)


def test_a_tensor_larger_than_a_file_stands_alone_in_its_place() -> None:
    assert split({"a": 3, "b": 50, "c": 3, "d": 7, "e": 1}, 10) == [["a"], ["b"], ["c", "d"], ["e"]]


def test_files_are_numbered_only_if_there_are_several() -> None:
    many = [tensor(str(n), shape=(3,)) for n in range(3)]
    assert [p.name for p in plan(many, Options())] == ["model.safetensors"]
    assert [p.name for p in plan(many, Options(max_shard_size=12), "adapter_model")] == [
        f"adapter_model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)
    ]


@given(st.lists(st.sampled_from(["F32", "BF16", "U8", "I64"]), max_size=6), st.sampled_from(DTYPES))
def test_a_header_says_what_is_planned(dtypes: list[str], asked: DType) -> None:
    for file in plan([tensor(f"{n}", d, shape=(n,)) for n, d in enumerate(dtypes)], Options(asked, 20)):
        data = MemoryFiles({"m": file.header + bytes(file.size - len(file.header))})
        found = [(t.name, t.dtype, t.shape, t.copies[0].parts[0].extent.start) for t in header_of(data, "m")]
        assert found == [(t.name, t.dtype, t.shape, t.start) for t in file.tensors]


@pytest.mark.parametrize("names", [["a", "a"], [""], ["__metadata__"], ["a\ud800"]])
def test_names_that_a_file_cannot_hold_are_corrupt(names: list[str]) -> None:
    with pytest.raises(Corrupt, match="name"):
        plan([tensor(name) for name in names], Options())


def test_what_does_not_tile_is_refused_before_anything_is_written() -> None:
    with pytest.raises(Corrupt, match="w: 2 elements found, 3 expected"):
        plan([Tensor("w", "F32", (3,), (Copy("F32", (3,), copy("F32").parts),))], Options())
    with pytest.raises(Corrupt, match="w: no copy"):
        plan([Tensor("w", "F32", (3,), ())], Options())


# the model's own element type, its stored copies; for each dtype asked for: the copy that is read, and what is written
TABLE = [
    ("BF16", ("F32", "BF16"), {"auto": "BF16 BF16", "keep": "F32 F32", "bf16": "BF16 BF16", "fp16": "F32 F16", "fp32": "F32 F32"}),
    ("BF16", ("F32",), {"auto": "F32 BF16", "keep": "F32 F32", "bf16": "F32 BF16", "fp16": "F32 F16", "fp32": "F32 F32"}),
    ("F32", ("F32",), {"auto": "F32 F32", "keep": "F32 F32", "bf16": "F32 BF16", "fp16": "F32 F16", "fp32": "F32 F32"}),
    ("F16", ("F32", "F16"), {"auto": "F16 F16", "keep": "F32 F32", "bf16": "F32 BF16", "fp16": "F16 F16", "fp32": "F32 F32"}),
    ("BF16", ("BF16",), {"auto": "BF16 BF16", "keep": "BF16 BF16", "bf16": "BF16 BF16", "fp16": "BF16 F16", "fp32": "BF16 F32"}),
    ("F64", ("F64",), {"auto": "F64 F64", "keep": "F64 F64", "bf16": "F64 BF16", "fp16": "F64 F16", "fp32": "F64 F32"}),
    *((whole, (whole,), dict.fromkeys(DTYPES, f"{whole} {whole}")) for whole in ("I64", "BOOL", "U8", "F8_E4M3", "C64")),
]


@pytest.mark.parametrize("asked", DTYPES)
@pytest.mark.parametrize(("own", "copies", "wanted"), TABLE, ids=lambda x: str(x) if not isinstance(x, dict) else "")
def test_the_copy_that_needs_no_cast_is_read_or_else_the_most_precise(
    own: str, copies: tuple[str, ...], wanted: dict[str, str], asked: DType
) -> None:
    of = tensor("w", own, *copies)
    assert f"{choose(of, asked).dtype} {target(of, asked)}" == wanted[asked]


def test_of_equal_copies_the_master_is_kept_and_the_models_own_is_taken_for_auto() -> None:
    both = Tensor("w", "F32", (2,), (copy("F32", file="master"), copy("F32", file="model")))
    assert choose(both, "keep").parts[0].extent.file == "master"
    assert choose(both, "auto").parts[0].extent.file == "model"


def test_a_copy_that_is_not_here_is_never_replaced_by_a_less_precise_one() -> None:
    absent = Copy("F32", (2,), (), absent="rank1.pt")
    of = Tensor("w", "BF16", (2,), (absent, copy("BF16", file="model")))
    assert [choose(of, d).parts[0].extent.file for d in ("auto", "bf16")] == ["model", "model"]
    for asked in ("keep", "fp32", "fp16"):
        with pytest.raises(Incomplete, match=r"rank1\.pt: not there; it holds the F32 copy of w"):
            choose(of, asked)
    same = Tensor("w", "F32", (2,), (absent, copy("F32", file="model")))
    assert [choose(same, d).parts[0].extent.file for d in DTYPES] == ["model"] * 5


def test_only_five_dtypes_can_be_asked_for() -> None:
    assert [check_dtype(d) for d in DTYPES] == list(DTYPES)
    with pytest.raises(Unsupported, match="dtype 'float32'") as e:
        check_dtype("float32")
    assert e.value.hint == "one of: auto, keep, bf16, fp16, fp32"


def test_no_tensors_are_no_files() -> None:
    assert plan([], Options()) == ()
