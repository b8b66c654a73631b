"""Every real checkpoint against what its framework gathered itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from blake3 import blake3
from safetensors import safe_open

from ckptsync.merger.plan import DType, MergeOptions
from tests.support.merge_on_disk import merge_local
from tests.support.vector import ROOT, Bits, Vector, bits, vector, vectors

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ALL = vectors()
DTYPES: tuple[DType, ...] = ("keep", "auto")
TIED_ZERO = ("raw-ds-zero2-bf16-tied", "raw-ds-zero3-tied")


def told(of: Vector) -> dict[str, object]:
    content: dict[str, object] = json.loads((ROOT / of.name / "vector.json").read_text())
    return content


def reference(of: Vector, dtype: DType) -> Bits:
    """As the framework gathered it.

    DeepSpeed's gathering leaves the second name of a tied weight out, its loading wants it.
    """
    found = dict(bits(of.keep if dtype == "keep" else of.auto))
    if of.name in TIED_ZERO:
        found[HEAD] = found[EMBEDDING]
    if told(of).get("adapter"):  # peft writes its names without the adapter's
        found = {name.replace(".default.", "."): value for name, value in found.items()}
    return found


def written(out: Path) -> Bits:
    return bits(*sorted(out.glob("*.safetensors")))


@pytest.mark.parametrize("of", ALL, ids=lambda v: v.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merge_equals_what_the_framework_gathered_bit_for_bit(
    of: Vector, dtype: DType, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    found = merge_local(of.sources, out, MergeOptions(dtype, max_shard_size=3000))
    tensors = written(out)
    assert tensors == reference(of, dtype)
    content = {p.name: p.read_bytes() for p in out.iterdir()}
    is_adapter = [n for n in content if n.endswith(".safetensors")] == ["adapter_model.safetensors"]
    assert is_adapter is bool(told(of).get("adapter"))
    # safetensors' own library opens every file, and what is said of them is right
    opened_names: dict[str, str] = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            opened_names |= dict.fromkeys(opened.keys(), path.name)
    indexes = [json.loads(data) for name, data in content.items() if name.endswith(".index.json")]
    assert len(indexes) == (len(set(opened_names.values())) > 1)
    assert all(index["weight_map"] == opened_names for index in indexes)
    assert {f.path: (f.size, f.digest) for f in found.files} == {
        name: (len(data), blake3(data).hexdigest()) for name, data in content.items()
    }
    assert [t.name for t in found.tensors] == [*tensors]
    for t in found.tensors:
        data = content[t.file][t.start : t.start + t.size]
        assert (t.dtype, t.shape, data) == tensors[t.name]
        assert blake3(data).hexdigest() == t.digest


@pytest.mark.parametrize(
    ("name", "base"), [("acc-fsdp2-peft", "base-tied"), ("acc-zero2-peft", "base")]
)
def test_the_base_model_in_the_shards_of_a_peft_model_is_the_one_that_was_adapted(
    name: str, base: str, tmp_path: Path
) -> None:
    found = merge_local(
        vector(name).sources, tmp_path / "out", MergeOptions(source="@base"), ROOT / base
    )
    assert written(tmp_path / "out") == bits(ROOT / base / "model.safetensors")
    assert found.source.endswith("@base")
    assert not (tmp_path / "out" / "adapter_config.json").exists()
