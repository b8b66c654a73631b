"""Tied weights are written once only where the configuration ties them and their bytes agree."""

from __future__ import annotations

import json

import pytest

from ckptsync.merge.plan import DType, Options
from ckptsync.merge.ties import EMBEDDINGS, HEADS, is_tied, without_tied
from ckptsync.model import Copy, Extent, Part, Shape, Tensor
from tests.plain_files import MemoryFiles

TIED = b'{"tie_word_embeddings": true}'
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tensor(name: str, file: str, shape: Shape = (2,), dtype: str = "F32", tied: str | None = None) -> Tensor:
    return Tensor(name, dtype, shape, (Copy(dtype, shape, (Part((0,) * len(shape), shape, Extent(file, 0, 8)),)),), tied)


def kept(
    tensors: list[Tensor], config: bytes | None = TIED, files: dict[str, bytes] | None = None, dtype: DType = "auto"
) -> tuple[list[str], tuple[str, ...]]:
    content = {"e": b"12345678", "same": b"12345678", "other": b"12345679"} if files is None else files
    found, notes = without_tied(tensors, MemoryFiles(content), Options(dtype), config)
    return [t.name for t in found], notes


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (TIED, True),
        (b'{"text_config": {"tie_word_embeddings": true}}', True),
        (b'{"tie_word_embeddings": false}', False),
        *((text, False) for text in (None, b"", b"{}", b"[]", b"5", b"nonsense", b"[" * 100_000, b"\xff", b'{"text_config": 5}')),
        (b'{"tie_word_embeddings": "yes"}', False),
    ],
)
def test_the_configuration_says_whether_head_and_embedding_are_one(config: bytes | None, wanted: bool) -> None:  # noqa: FBT001
    assert is_tied(config) is wanted


def test_equal_bytes_are_kept_once_under_the_embeddings_name() -> None:
    for dtype in ("auto", "keep", "bf16"):
        names, notes = kept([tensor(HEAD, "same"), tensor("x", "e"), tensor(EMBEDDING, "e")], dtype=dtype)
        assert names == ["x", EMBEDDING]
        assert notes == (f"{HEAD} is tied to {EMBEDDING}: one copy is kept",)


def test_bytes_that_differ_are_both_kept_and_it_is_said() -> None:
    names, notes = kept([tensor(EMBEDDING, "e"), tensor(HEAD, "other")])
    assert names == [EMBEDDING, HEAD]
    assert notes == (f"{HEAD} and {EMBEDDING} are tied by the configuration, but differ: both are kept",)


def test_without_the_configurations_word_both_are_kept() -> None:
    for config in (None, b"{}", json.dumps({"tie_word_embeddings": False}).encode()):
        assert kept([tensor(EMBEDDING, "e"), tensor(HEAD, "e", tied=EMBEDDING)], config) == ([EMBEDDING, HEAD], ())


@pytest.mark.parametrize(("head", "embedding"), [(EMBEDDING, None), (None, HEAD)])
def test_where_the_framework_ties_them_nothing_is_read(head: str | None, embedding: str | None) -> None:
    names, _ = kept([tensor(EMBEDDING, "e", tied=embedding), tensor(HEAD, "e", tied=head)], files={})
    assert names == [EMBEDDING]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("embedding", EMBEDDINGS)
def test_the_names_of_any_of_transformers_models_are_known(head: str, embedding: str) -> None:
    assert kept([tensor(f"a.{embedding}", "e"), tensor(f"b.{head}", "same")])[0] == [f"a.{embedding}"]


def test_only_the_one_embedding_of_the_same_shape_and_type_is_meant() -> None:
    others = [tensor("a.wte.weight", "e", (1, 2)), tensor("b.wte.weight", "e", dtype="I32")]
    assert kept([*others, tensor(HEAD, "same")]) == ([*(t.name for t in others), HEAD], ())
    two = [tensor("a.wte.weight", "e"), tensor("b.wte.weight", "e")]
    assert kept([*two, tensor(HEAD, "same")]) == ([*(t.name for t in two), HEAD], ())
