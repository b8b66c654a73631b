"""What proves a shape: the optimizer's metadata, a base model, a configuration.

And what does not.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptsync.errors import Corrupt
from ckptsync.layouts import dcp_safetensors
from ckptsync.layouts.dcp_safetensors import ExpectedModel, ShapeProof
from ckptsync.tensors import Extent, Part, Shape
from tests.support.files_in_memory import MemoryFiles, tree
from tests.support.vector import ROOT, bits, vector

LLAMA = json.loads((ROOT / "architectures.json").read_text())[0]
SHAPES: dict[str, Shape] = {name: tuple(shape) for name, shape in LLAMA["shapes"].items()}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def box(*sizes: int, at: Shape | None = None) -> Part:
    return Part(at or (0,) * len(sizes), sizes, Extent("shard", 0, 0))


def found(
    files: MemoryFiles, *names: str, outside: ExpectedModel | None = None, root: str = ""
) -> tuple[ShapeProof, ...]:
    return dcp_safetensors.find_proofs(
        files, root, dict.fromkeys(names, "F32"), outside or ExpectedModel()
    )


def config(**changes: Any) -> bytes:
    return json.dumps({**LLAMA["config"], **changes}).encode()


def test_a_real_optimizer_proves_the_shape_of_every_trained_tensor_and_who_wrote() -> None:
    of = vector("tf5-fsdp2")
    files = tree(*of.sources)
    del files.content["config.json"]
    (proof,) = found(files, EMBEDDING)
    assert proof.shapes == {name: shape for name, (_, shape, _) in bits(of.keep).items()}
    assert (proof.ranks, proof.files, proof.names) == ((0, 1, 2), ("optimizer/.metadata",), "some")
    assert set(proof.needed) == proof.shapes.keys()


def test_names_of_optimizer_states_are_read_out_of_any_wrapper() -> None:
    of = tree(*vector("hf-writer-mesh").sources)
    (proof,) = found(of, "up.weight", root="sharded")
    assert {n: proof.shapes[n] for n in ("up.weight", "one_row", "table", "shared")} == {
        "up.weight": (11, 7),
        "one_row": (1, 9),
        "table": (5, 7),
        "shared": (3, 2),
    }
    (accelerate,) = [
        p
        for p in found(tree(*vector("hf-fsdp2-2node").sources), EMBEDDING)
        if p.by.startswith("optimizer_0")
    ]
    assert accelerate.shapes[EMBEDDING] == (71, 20)


def test_a_dcp_of_weights_proves_nothing_and_a_damaged_one_is_corrupt() -> None:
    files = tree(*vector("hf-fsdp1").sources)
    assert found(files, EMBEDDING) == ()
    name = next(n for n in files.content if n.endswith(".metadata"))
    files.content[name] = files.content[name][:-5]
    with pytest.raises(Corrupt, match="metadata"):
        found(files, EMBEDDING)
    files.content[name] = (
        b"\x80\x04cos\nsystem\n."  # of another kind: neither a proof nor a fault of the shards
    )
    assert found(files, EMBEDDING) == ()


def test_a_configuration_names_every_tensor_and_needs_them_all() -> None:
    (proof,) = found(MemoryFiles({"config.json": config()}), *SHAPES)
    assert (proof.shapes, proof.names, set(proof.needed)) == (SHAPES, "all", set(SHAPES))
    assert found(MemoryFiles({"config.json": config()}), *SHAPES, "v_head.weight") == ()
    assert found(MemoryFiles({"config.json": config(architectures=["Other"])}), *SHAPES) == ()
    with pytest.raises(Corrupt, match=r"config\.json"):
        found(MemoryFiles({"config.json": b"{"}), *SHAPES)


@pytest.mark.parametrize(
    ("root", "place"),
    [
        ("", "config.json"),
        ("sharded", "config.json"),
        ("m/sharded", "m/config.json"),
        ("m", "config.json"),
    ],
)
def test_a_configuration_is_looked_for_beside_the_shards_and_above(root: str, place: str) -> None:
    (proof,) = found(MemoryFiles({place: config()}), *SHAPES, root=root)
    assert (proof.by, proof.files) == (place, (place,))


def test_a_tied_head_needs_no_copy_and_has_the_embeddings_shape() -> None:
    (proof, tie) = found(MemoryFiles({"config.json": config(tie_word_embeddings=True)}), *SHAPES)
    assert set(proof.needed) == SHAPES.keys() - {HEAD}
    assert tie.shapes == {HEAD: (71, 20)}
    unknown = ExpectedModel(
        {EMBEDDING: (9, 4)}, config(tie_word_embeddings=True, architectures=["Other"])
    )
    assert dcp_safetensors.proven_shapes(
        {HEAD: [box(9, 4)], EMBEDDING: [box(9, 4)]},
        found(MemoryFiles({}), HEAD, EMBEDDING, outside=unknown),
    ) == {
        HEAD: (9, 4),
        EMBEDDING: (9, 4),
    }


def test_the_strongest_proof_of_a_tensor_counts() -> None:
    proofs = [
        ShapeProof("optimizer", {"w": (4,)}, "some"),
        ShapeProof("base", {"w": (5,), "v": (2,)}, "most"),
    ]
    assert dcp_safetensors.proven_shapes({"w": [box(4)], "v": [box(2)]}, proofs) == {
        "w": (4,),
        "v": (2,),
    }


def test_a_packed_matrix_of_the_base_proves_shards_of_its_element_type_alone() -> None:
    base = ExpectedModel({"w": (2, 3), "v": (4,)}, packed={"w": "U8"})
    files = MemoryFiles({})
    (proof,) = dcp_safetensors.find_proofs(files, "", {"w": "U8", "v": "F32"}, base)
    assert proof.shapes == base.shapes
    (proof,) = dcp_safetensors.find_proofs(files, "", {"w": "BF16", "v": "F32"}, base)
    assert proof.shapes == {"v": (4,)}
