"""A whole model from a checkpoint and the files of a model: what is taken, how it is named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.merger.engine import Destination, write_model
from ckptsync.merger.joined_files import FILL, JoinedFiles
from ckptsync.merger.name_mapping import check_not_quantized
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import MergeJob, prepare
from ckptsync.tensors import Tensor
from tests.support.dcp_writer import checkpoint
from tests.support.files_in_memory import MemoryFiles, safetensors_file
from tests.support.merge_in_memory import Written
from tests.support.vector import Bits

Arrays = Mapping[str, npt.NDArray[Any]]
L = "model.layers.0"
H, I, E = 3, 2, 4  # noqa: E741 - hidden size, size of an expert, experts
MIXTRAL = {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
QWEN2_5 = {"model_type": "qwen2_5_vl", "architectures": ["Qwen2_5_VLForConditionalGeneration"]}


def values(start: int, *shape: int) -> npt.NDArray[np.float32]:
    return (start + np.arange(np.prod(shape), dtype="<f4")).reshape(shape)


EXPERTS = {
    f"{L}.mlp.experts.gate_up_proj": values(100, E, 2 * I, H),
    f"{L}.mlp.experts.down_proj": values(500, E, H, I),
}
LIVE: Arrays = {
    "model.embed_tokens.weight": values(900, 5, H),
    f"{L}.mlp.gate.weight": values(800, E, H),
    **EXPERTS,
    "lm_head.weight": values(0, 5, H),
}
BASE: Arrays = {
    "model.embed_tokens.weight": LIVE["model.embed_tokens.weight"],
    f"{L}.block_sparse_moe.gate.weight": LIVE[f"{L}.mlp.gate.weight"],
    **{
        f"{L}.block_sparse_moe.experts.{e}.{name}.weight": value
        for e in range(E)
        for name, value in (
            ("w1", EXPERTS[f"{L}.mlp.experts.gate_up_proj"][e, :I]),
            ("w2", EXPERTS[f"{L}.mlp.experts.down_proj"][e]),
            ("w3", EXPERTS[f"{L}.mlp.experts.gate_up_proj"][e, I:]),
        )
    },
    "lm_head.weight": LIVE["lm_head.weight"],
}


def whole(arrays: Arrays, config: Mapping[str, Any]) -> MemoryFiles:
    tensors = {n: ("F32", a.shape, a.tobytes()) for n, a in arrays.items()}
    return MemoryFiles(
        {
            "model.safetensors": safetensors_file(tensors),
            "config.json": json.dumps(config).encode(),
        }
    )


def sharded(arrays: Arrays, config: Mapping[str, Any], *lost: str) -> MemoryFiles:
    """A distributed checkpoint of two ranks, which have half of each tensor's rows."""
    tensors = {}
    for name, array in arrays.items():
        rows = len(array) // 2
        boxes = {
            (at, *(0,) * (array.ndim - 1)): (array[at:end].shape, array[at:end].tobytes())
            for at, end in ((0, rows), (rows, len(array)))
        }
        tensors[name] = (array.shape, boxes)
    files = checkpoint("", tensors) | {"config.json": json.dumps(config).encode()}
    return MemoryFiles({n: data for n, data in files.items() if n not in lost})


def merged(files: MemoryFiles, dtype: Any = "keep", **models: Any) -> tuple[Bits, MergeJob]:
    job = prepare(files, MergeOptions(dtype), **models)
    written = Written()
    reader = JoinedFiles(files, {FILL: models["fill_from"]}) if "fill_from" in models else files
    write_model(job, reader, Destination(written.write), None)
    data = written["model.safetensors"]
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__")
    bits = {
        name: (
            entry["dtype"],
            tuple(entry["shape"]),
            data[8 + size :][slice(*entry["data_offsets"])],
        )
        for name, entry in header.items()
    }
    return bits, job


def bits(arrays: Arrays) -> Bits:
    return {n: ("F32", a.shape, a.tobytes()) for n, a in arrays.items()}


@pytest.mark.parametrize("write", [whole, sharded])
def test_fused_experts_are_split_as_the_base_has_them(write: Any) -> None:
    found, _ = merged(write(LIVE, MIXTRAL), names_of=whole(BASE, MIXTRAL))
    assert found == bits(BASE)
    assert [*found] == [*BASE]  # in its order, too


def test_experts_of_a_checkpoint_are_fused_as_the_base_has_them() -> None:
    found, _ = merged(sharded(BASE, MIXTRAL), names_of=whole(LIVE, MIXTRAL))
    assert found == bits(LIVE)


def test_names_that_are_the_bases_already_stay() -> None:
    for arrays in (LIVE, BASE):
        found, _ = merged(sharded(arrays, MIXTRAL), names_of=whole(arrays, MIXTRAL))
        assert found == bits(arrays)


@pytest.mark.parametrize("is_inner", [False, True])
def test_a_base_that_is_the_model_inside_lends_its_names(is_inner: bool) -> None:  # noqa: FBT001
    inner = {"h.0.x.weight": values(0, 2, 2), "wte.weight": values(9, 3, 2)}
    outer = {f"transformer.{n}": a for n, a in inner.items()}
    own, base = (outer, inner) if is_inner else (inner, outer)
    assert merged(sharded(own, {}), names_of=whole(base, {}))[0] == bits(base)


def test_transposed_experts_are_written_as_the_base_has_them() -> None:
    config = {"model_type": "qwen3_vl_moe"}
    name = f"{L}.mlp.experts.gate_up_proj"
    base = {name: EXPERTS[name].swapaxes(1, 2)}
    found, _ = merged(sharded({name: EXPERTS[name]}, config), names_of=whole(base, config))
    assert found == bits(base)
    both = whole({n: a.swapaxes(1, 2) for n, a in EXPERTS.items()}, config)
    assert merged(sharded({name: EXPERTS[name]}, config), fill_from=both)[0] == bits(EXPERTS)


VISUAL = {
    "model.visual.a": values(0, 4),
    "model.language_model.b": values(9, 2),
    "lm_head.weight": values(5, 3, 2),
}
ON_DISK = {"visual.a": values(70, 4), "model.b": values(80, 2), "lm_head.weight": values(90, 3, 2)}


def test_what_the_save_left_out_is_taken_from_the_base_and_said() -> None:
    trained = {n: a for n, a in VISUAL.items() if "visual" not in n}
    base = whole(ON_DISK, QWEN2_5)
    found, job = merged(sharded(trained, QWEN2_5), fill_from=base)
    assert found == bits({**trained, "model.visual.a": ON_DISK["visual.a"]})
    assert job.filled == ("model.visual.a",)
    assert job.notes[0] == (
        "--fill-from: 1 of 3 tensors are the given model's, since the checkpoint does not hold"
        " them: 1 of model.visual; 2 are the checkpoint's"
    )
    both, job = merged(sharded(trained, QWEN2_5), fill_from=base, names_of=base, base=base)
    expected = {"visual.a": ON_DISK["visual.a"], "model.b": VISUAL["model.language_model.b"]}
    assert both == bits({**expected, "lm_head.weight": VISUAL["lm_head.weight"]})
    assert job.filled == ("visual.a",)


def test_experts_that_were_not_saved_are_taken_from_the_base() -> None:
    trained = {n: a + 1 for n, a in LIVE.items() if "experts" not in n}
    base = whole(BASE, MIXTRAL)
    found, job = merged(sharded(trained, MIXTRAL), fill_from=base)
    assert found == bits({**trained, **EXPERTS})
    assert job.filled == (*EXPERTS,)
    both, _ = merged(sharded(trained, MIXTRAL), "bf16", fill_from=base, names_of=base)
    assert both.keys() == BASE.keys()
    assert {dtype for dtype, _, _ in both.values()} == {"BF16"}


def test_a_checkpoint_that_holds_everything_takes_nothing() -> None:
    found, job = merged(sharded(LIVE, MIXTRAL), fill_from=whole(BASE, MIXTRAL))
    assert (found, job.filled) == (bits(LIVE), ())
    assert job.notes[0] == "--fill-from: nothing taken, the checkpoint holds all 5 tensors"


def test_a_tied_name_is_neither_taken_nor_asked_for() -> None:
    tied = MIXTRAL | {"tie_word_embeddings": True}
    own = {n: a for n, a in LIVE.items() if n != "lm_head.weight"}
    base = whole(BASE, tied)  # with another head
    found, job = merged(sharded(own, tied), fill_from=base, names_of=base)
    assert job.filled == ()
    assert found == bits({n: a for n, a in BASE.items() if n != "lm_head.weight"})


def test_a_resized_vocabulary_stays() -> None:
    own = {**LIVE, **{n: values(7, 6, H) for n in ("model.embed_tokens.weight", "lm_head.weight")}}
    base = whole(BASE, MIXTRAL)
    found, _ = merged(sharded(own, MIXTRAL), fill_from=base, names_of=base)
    assert found["lm_head.weight"] == bits(own)["lm_head.weight"]
    del own["lm_head.weight"]
    with pytest.raises(Unsupported, match=r"embed_tokens.weight has 6 rows, 5 in the given model"):
        merged(sharded(own, MIXTRAL), fill_from=base)


def without(arrays: Arrays, part: str) -> Arrays:
    return {n: a for n, a in arrays.items() if part not in n}


LOST = whole(without(BASE, "experts.2.w3"), MIXTRAL)
OTHER = whole({**BASE, "lm_head.weight": values(0, 5, H + 1)}, MIXTRAL)
UNKNOWN = {"model_type": "mixtral of tomorrow"}


@pytest.mark.parametrize("option", ["names_of", "fill_from"])
def test_a_head_that_the_given_files_do_not_have_is_tied(option: str) -> None:
    own = {**LIVE, "lm_head.weight": LIVE["model.embed_tokens.weight"]}
    found, _ = merged(sharded(own, MIXTRAL), **{option: whole(without(BASE, "head"), MIXTRAL)})
    assert "lm_head.weight" not in found


QUANTISED = MIXTRAL | {"quantization_config": {"quant_method": "fp8"}}
WHOLE, FOREIGN = whole(BASE, MIXTRAL), whole(BASE, UNKNOWN)
UNPROVEN: list[tuple[MemoryFiles, dict[str, MemoryFiles], type[CkptsyncError], str]] = [
    # a shard that the metadata names is missing: nothing stands for it
    (sharded(LIVE, MIXTRAL, "__1_0.distcp"), {"fill_from": WHOLE}, Incomplete, "__1_0.distcp"),
    (
        sharded(without(LIVE, "gate.weight"), MIXTRAL),
        {"names_of": WHOLE},
        Incomplete,
        "1 of the 5 tensors of the model whose names are to be written are missing",
    ),
    (sharded(LIVE, UNKNOWN), {"names_of": FOREIGN}, Unsupported, "3 of 5 tensors have no pl"),
    (sharded(LIVE, UNKNOWN), {"fill_from": FOREIGN}, Unsupported, "3 of 5 tensors have no pl"),
    (
        sharded({**LIVE, "score.weight": values(0, 1, H)}, MIXTRAL),
        {"fill_from": WHOLE},
        Unsupported,
        "1 of 6 tensors have no place in the model of the given files.*: score.weight",
    ),
    (sharded(LIVE, MIXTRAL), {"names_of": LOST}, Unsupported, "make up no whole one"),
    (sharded(LIVE, MIXTRAL), {"fill_from": OTHER}, Corrupt, r"lm_head.weight is \[5, 3\]"),
    (
        sharded(LIVE, MIXTRAL),
        {"names_of": whole(BASE, QUANTISED)},
        Unsupported,
        "the given model is quantised",
    ),
]


@pytest.mark.parametrize(("files", "models", "kind", "text"), UNPROVEN)
def test_what_is_not_proven_is_refused(
    files: MemoryFiles, models: dict[str, MemoryFiles], kind: type[CkptsyncError], text: str
) -> None:
    with pytest.raises(kind, match=text):
        merged(files, **models)


@pytest.mark.parametrize(
    ("own", "given", "lost"),
    [
        ({"num_hidden_layers": 1}, {"num_hidden_layers": 2}, "gate.weight"),
        ({"model_type": "mixtral"}, {"model_type": "minimax"}, "gate.weight"),
        ({"text_config": {"hidden_size": 3}}, {"text_config": {"hidden_size": 4}}, "gate.weight"),
        ({"vocab_size": 4}, {"vocab_size": 5}, "lm_head.weight"),
    ],
)
def test_nothing_is_taken_from_a_model_of_another_structure(
    own: dict[str, Any], given: dict[str, Any], lost: str
) -> None:
    part, base = without(LIVE, lost), MIXTRAL | given
    with pytest.raises(Unsupported, match=f"{next(iter(given))}.* is .* in its config.json, "):
        merged(sharded(part, MIXTRAL | own), fill_from=whole(BASE, base))
    whole_model, job = merged(sharded(LIVE, MIXTRAL | own), fill_from=whole(BASE, base))
    assert (whole_model, job.filled) == (bits(LIVE), ())


def test_a_resized_vocabulary_does_not_make_another_structure() -> None:
    part = without(LIVE, "gate.weight")
    _, job = merged(
        sharded(part, MIXTRAL | {"vocab_size": 4}),
        fill_from=whole(BASE, MIXTRAL | {"vocab_size": 5}),
    )
    assert job.filled == (f"{L}.mlp.gate.weight",)


def test_nothing_tells_how_a_tensor_lies_that_the_checkpoint_does_not_hold() -> None:
    config = {"model_type": "qwen3_vl_moe"}
    base = {f"{L}.mlp.experts.gate_up_proj": values(0, 2, 3, 4), "x": values(0, 2)}
    with pytest.raises(Unsupported, match="nothing tells whether the file has its last two axes"):
        merged(sharded({"x": values(0, 2)}, config), fill_from=whole(base, config))


def test_an_adapter_is_neither_filled_nor_renamed() -> None:
    adapter = {"base_model.model.x.lora_A.weight": values(0, 2, 2)}
    adapter |= {"base_model.model.x.lora_B.weight": values(0, 2, 2)}
    with pytest.raises(Unsupported, match="an adapter; --fill-from and --names-of are for models"):
        merged(sharded(adapter, {}), fill_from=whole(BASE, MIXTRAL))


@pytest.mark.parametrize(
    ("lost", "is_known"), [(("v",), True), (("q",), True), (("k", "v"), False), (("q", "k"), False)]
)
def test_a_part_of_fused_attention_is_taken_only_where_its_size_is_known(
    lost: tuple[str, ...], *, is_known: bool
) -> None:
    sarvam = {"model_type": "sarvam_moe", "architectures": ["SarvamMoEForCausalLM"]}
    rows = {"q": values(0, 8, H), "k": values(50, 2, H), "v": values(80, 2, H)}
    own = {f"{L}.self_attn.{part}_proj.weight": rows[part] for part in rows}
    others = {"model.norm.weight": values(7, H)}
    fused = {f"{L}.attention.query_key_value.weight": np.concatenate([*rows.values()]), **others}
    part = {n: value for n, value in own.items() if n[-13] not in lost} | others
    base = whole(fused, sarvam)
    if is_known:
        assert merged(sharded(part, sarvam), fill_from=base)[0] == bits(own | others)
    else:
        with pytest.raises(Unsupported, match="nothing says how many are whose"):
            merged(sharded(part, sarvam), fill_from=base)


def test_a_mask_of_bytes_is_no_quantised_weight() -> None:
    def check(name: str) -> None:
        check_not_quantized({name: Tensor(name, "U8", (1, 1, 4, 4), ())}, {})

    check("h.0.attn.bias")
    with pytest.raises(Unsupported, match=r"h.0.attn.c_attn.weight"):
        check("h.0.attn.c_attn.weight")
