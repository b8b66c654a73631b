"""A real tensor-parallel checkpoint, whole in ``tests/merger/test_vectors.py``.

Here every other rule, patterns of names, and boxes of shards against torch's slices.
"""

from __future__ import annotations

import re
from itertools import pairwise
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts.zero_tensor_parallel import NamePatterns, cut_box
from ckptsync.merger.plan import DType
from ckptsync.tensors import Copy, Extent, Part
from tests.support.deepspeed_in_memory import TAG, changed, held, without
from tests.support.files_in_memory import MemoryFiles
from tests.support.zero_writer import Tensors, merged

MODELS = [f"{TAG}/mp_rank_{n:02d}_model_states.pt" for n in (0, 1)]
UP = r"^layers\.0\.up_proj\.weight$"
INFO = "universal_checkpoint_info"


def files() -> MemoryFiles:
    return held("raw-ds-tensor")


def told(change: Any) -> MemoryFiles:
    """The real checkpoint, with another ``universal_checkpoint_info`` in both model files."""
    of = files()
    for path in MODELS:
        of = changed(of, path, lambda model: change(model[INFO]))
    return of


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("dtype", ["keep", "auto"])
def test_patterns_alone_say_the_same_as_the_affine_map(dtype: DType) -> None:
    assert same(merged(told(lambda info: info.pop("affine_map")), dtype), merged(files(), dtype))


def test_every_ranks_masters_are_wanted() -> None:
    for path in [n for n in files().sizes() if "optim" in n]:
        with pytest.raises(Incomplete, match=path):
            merged(without(files(), path), "keep")
        assert same(merged(without(files(), path), "auto"), merged(files(), "auto"))


def test_without_a_word_on_how_to_join_them_ranks_are_refused() -> None:
    of = files()
    for path in MODELS:
        of = changed(of, path, lambda model: model.pop(INFO))
    with pytest.raises(Unsupported, match="no universal_checkpoint_info") as e:
        merged(of, "auto")
    assert "ds_to_universal" in e.value.hint


PIECE = {"shape": [6, 8], "source": [0, [8, 1]], "dest": [0, [8, 1]], "locations": [0]}
WORSE: list[tuple[dict[str, Any], type[CkptsyncError]]] = [
    ({"scale": 0.5}, Unsupported),
    ({"source": [0, [1, 8]]}, Unsupported),
    ({"source": [1, [8, 1]]}, Corrupt),
    ({"source": [8, [8, 1]]}, Corrupt),
    ({"source": [90, [8, 1]]}, Corrupt),
    ({"source": [1 << 70, [8, 1]]}, Corrupt),
    ({"shape": [5, 8]}, Corrupt),
    ({"shape": [48]}, Unsupported),
    ({"dest": [3, [8, 1]]}, Corrupt),
    ({"locations": [1]}, Corrupt),
    ({"locations": []}, Corrupt),
    ({"shape": None}, Corrupt),
    ({"source": [0]}, Corrupt),
    ({"source": ["a", [8, 1]]}, Corrupt),
]


@pytest.mark.parametrize(("change", "error"), WORSE, ids=str)
def test_a_piece_that_cannot_be_is_never_joined(
    change: dict[str, Any], error: type[CkptsyncError]
) -> None:
    def spoil(info: dict[str, Any]) -> None:
        info["affine_map"]["params"][UP]["ranks"][0]["pieces"] = [PIECE | change]

    assert same(merged(told(lambda info: None), "auto"), merged(files(), "auto"))
    with pytest.raises(error):
        merged(told(spoil), "auto")


SUB = [{"patterns": [UP], "shape": [(6, 6), -1], "partition_dim": 0}]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        *(
            ({"affine_map": None, key: value}, key)
            for key, value in (
                ("parameter_to_average_patterns", [UP]),
                ("parameter_with_2_sub_params_cat_dim_0", [UP]),
                ("parameter_with_sub_params", SUB),
            )
        ),
        ({"autotp_unsupported_parameter_patterns": {UP: "why"}}, "AutoTP says"),
        ({"affine_map": {"version": 2}}, "affine_map of version 2"),
    ],
    ids=str,
)
def test_what_cannot_be_joined_is_refused(change: dict[str, Any], match: str) -> None:
    with pytest.raises(Unsupported, match=match):
        merged(told(lambda info: info.update(change)), "auto")


def test_rows_that_only_fill_up_a_vocabulary_are_left_out() -> None:
    def padded(rows: object) -> MemoryFiles:
        return told(
            lambda info: info.update(
                vocabulary_parameter_patterns=[r"^emb\.weight$"], original_vocab_size=rows
            )
        )

    whole, found = merged(files(), "keep"), merged(padded(35), "keep")
    assert torch.equal(found["emb.weight"], whole["emb.weight"][:35])
    assert same(merged(padded(37), "keep"), whole)
    for rows in (None, 0, -1, 38, "35"):
        with pytest.raises(Corrupt, match="a vocabulary of"):
            merged(padded(rows), "keep")


@pytest.mark.parametrize(
    ("more", "ranks", "error", "match"),
    [
        ({"k": torch.tensor(3)}, (1,), Unsupported, "k: a buffer that is not the same"),
        ({"more": torch.ones(2)}, (1,), Corrupt, "more is not in every"),
        ({"frozen": torch.ones(2)}, (0, 1), Unsupported, "frozen: nothing says how"),
    ],
)
def test_tensors_that_no_rule_names_are_not_joined(
    more: Tensors, ranks: tuple[int, ...], error: type[CkptsyncError], match: str
) -> None:
    of = files()
    for rank in ranks:
        of = changed(of, MODELS[rank], lambda model: model["module"].update(more))
    with pytest.raises(error, match=match):
        merged(of, "auto")


@pytest.mark.parametrize(
    "info", [lambda info: None, lambda info: info.pop("affine_map")], ids=["affine map", "patterns"]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replicated_parameter_with_other_values_on_one_rank_is_corrupt(
    info: Any, rank: int
) -> None:
    of = told(info)
    name = next(n for n, value in merged(of, "auto").items() if "norm" in n or n.endswith("bias"))
    spoilt = changed(
        of, MODELS[rank], lambda model: model["module"].update({name: model["module"][name] + 1})
    )
    with pytest.raises(Corrupt, match=f"values of {name} differ from those in"):
        merged(spoilt, "auto")


NAMES = [
    "layers.0.up.weight",
    "layers.10.up.weight",
    "tied_modules.embed.word_embeddings.weight",
    "3.mlp.dense_h_to_4h.bias",
    "x",
    "",
]
PATTERNS = [
    r"^layers\.0\.up\.weight$",
    r"\d+.mlp.dense_h_to_4h.bias",
    r"tied_modules.embed.word_embeddings.weight",
    r"layers.\d+.up.weight",
    r".*\.weight",
    r"^x",
    "x",
    r"^.$",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_deepspeed_means_by_it(pattern: str) -> None:
    found = NamePatterns({pattern: 5}, "a")
    assert [found.find(name) for name in NAMES] == [
        [5] if re.match(pattern, name) else [] for name in NAMES
    ]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_name_that_is_escaped_matches_itself_alone_or_is_refused(name: str) -> None:
    try:
        found = NamePatterns({f"^{re.escape(name)}$": 1}, "a")
    except Unsupported:
        return
    assert found.find(name)
    assert not found.find(name + "x")


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+$", "a|b", "[ab]", "a{5}", ".*.*.*.*", r"\w+", "a" * 600, 5, None, r"\1", "a?", "a$b"],
)
def test_a_pattern_that_could_take_for_ever_or_is_none_is_refused(pattern: object) -> None:
    with pytest.raises(Unsupported, match="pattern"):
        NamePatterns({pattern: 1}, "a")


def test_two_patterns_for_one_name_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="2 patterns"):
        NamePatterns({"x": 1, "^x$": 2}, "a").find("x")


SHAPES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)


def read(copy: Copy, whole: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Do what the merge engine does with parts, in the slowest way."""
    out = whole.clone()
    for part in copy.parts:
        strides = part.strides or torch.empty(part.sizes).stride()
        block = torch.as_strided(stored, part.sizes, strides, part.extent.start // 8)
        out[tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))] = block
    return out


@given(SHAPES, st.data())
def test_any_box_of_a_shard_in_any_pieces_lands_where_it_belongs(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    shard = torch.arange(prod(shape)).reshape(shape) + 1
    held = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    box = tuple(a for a, _ in held), tuple(b - a for a, b in held)
    into = tuple(data.draw(st.integers(0, 2)) for _ in shape)
    ends = sorted({0, prod(shape), *data.draw(st.lists(st.integers(0, prod(shape)), max_size=3))})
    parts = tuple(Part((a,), (b - a,), Extent("f", 8 * a, 8 * (b - a))) for a, b in pairwise(ends))
    of = Copy("I64", (prod(shape),), parts)
    whole = torch.zeros([i + n for i, n in zip(into, box[1], strict=True)], dtype=torch.int64)
    wanted = whole.clone()
    wanted[tuple(slice(i, None) for i in into)] = shard[tuple(slice(a, b) for a, b in held)]
    placed = Copy("I64", tuple(whole.shape), tuple(cut_box(of, shape, box, into)))
    assert torch.equal(read(placed, whole, shard.reshape(-1)), wanted)


def test_a_shard_that_is_stored_by_columns_keeps_its_strides() -> None:
    stored = torch.arange(6)  # a (2, 3) tensor, transposed
    of = Copy("I64", (2, 3), (Part((0, 0), (2, 3), Extent("f", 0, 48), (1, 2)),))
    placed = Copy("I64", (2, 2), tuple(cut_box(of, (2, 3), ((0, 1), (2, 2)), (0, 0))))
    assert torch.equal(
        read(placed, torch.zeros(2, 2, dtype=torch.int64), stored), stored.reshape(3, 2).T[:, 1:]
    )
