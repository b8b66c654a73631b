"""Patterns match what ``re.match`` matches, and none of them can take for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.layouts.zero_patterns import Patterns

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
    found = Patterns({pattern: 5}, "a")
    assert [found.finds(name) for name in NAMES] == [re.match(pattern, name) is not None for name in NAMES]
    assert [found.find(name) for name in NAMES] == [5 if re.match(pattern, name) else None for name in NAMES]


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_any_name_that_is_escaped_matches_itself_alone_or_is_refused(name: str) -> None:
    try:
        found = Patterns({f"^{re.escape(name)}$": 1}, "a")
    except Unsupported:
        return
    assert found.finds(name)
    assert not found.finds(name + "x")


@pytest.mark.parametrize("pattern", ["(a+)+$", "a|b", "[ab]", "a{5}", ".*.*.*.*", r"\w+", "a" * 600, 5, None, r"\1", "a?", "a$b"])
def test_a_pattern_that_could_take_for_ever_or_is_none_is_refused(pattern: object) -> None:
    with pytest.raises(Unsupported, match="pattern"):
        Patterns({pattern: 1}, "a")


def test_two_patterns_for_one_name_are_corrupt() -> None:
    with pytest.raises(Corrupt, match="2 patterns"):
        Patterns({"x": 1, "^x$": 2}, "a").find("x")
