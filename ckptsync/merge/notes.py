"""What the reader of a merge should know besides, judged by the configuration beside the weights.  Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckptsync.formats.dtypes import FROM_TORCH, PRECISION, is_castable
from ckptsync.merge.plan import DType
from ckptsync.model import Tensor

NO_CONFIG = "no config.json was found: give its directory with --config-from, so that from_pretrained can open the model"
NO_ADAPTER_CONFIG = (
    "no adapter_config.json was found: give its directory with --config-from; without it PeftModel cannot open the adapter, and its"
    " scale (lora_alpha) is in no shard, so it is not invented"
)
FUSED = (
    "the experts of a layer are one tensor, as transformers 5 has them in memory: its from_pretrained opens them, while loaders that want one"
    " tensor an expert (vLLM, older transformers) do not; save_pretrained of the opened model writes those"
)
PACKED = (
    "weights are quantised by bitsandbytes: their packed bytes are copied as they are, and whoever opens them needs the"
    " quantization_config that they were made with"
)
LORA = (
    "there are LoRA weights, under the names that the shards give them: from_pretrained does not look for those; if they are peft's,"
    " --source SOURCE@adapter writes the adapter, and @base the model under it"
)


def of_code(left_out: Sequence[str]) -> tuple[str, ...]:
    """Of code in a checkpoint that is not written."""
    if not left_out:
        return ()
    note = (
        f"left out, since code in a checkpoint may be anyone's: {', '.join(left_out)}; code is taken from the directory of"
        " --config-from (head.config_from), and with --allow-code (head.allow_code) from the checkpoint"
    )
    return (note,)


def of_model(tensors: Sequence[Tensor], config: Mapping[str, Any] | None, asked: DType) -> Iterator[str]:
    """Of a model, as it is going to be written."""
    if config is None:
        yield NO_CONFIG
    yield from _dtype(tensors, config or {}, asked)
    yield from _quantised(tensors, config or {})
    if any(t.name.endswith(".SCB") or ".quant_state.bitsandbytes__" in t.name for t in tensors):
        yield PACKED
    if any(t.name.endswith((".experts.gate_up_proj", ".experts.down_proj")) for t in tensors):
        yield FUSED
    if any(".lora_" in t.name for t in tensors):
        yield LORA


def _dtype(tensors: Sequence[Tensor], config: Mapping[str, Any], asked: DType) -> Iterator[str]:
    """Mixed precision stores what the optimizer works on: FSDP shards of a bf16 model are float32."""
    nested = config.get("text_config")
    places = [c for c in (config, nested) if isinstance(c, dict)]
    said = next((c[key] for c in places for key in ("dtype", "torch_dtype") if isinstance(c.get(key), str)), "")
    found = {t.dtype for t in tensors if is_castable(t.dtype)}
    if asked == "auto" and len(found) == 1 and 0 < PRECISION.get(FROM_TORCH.get(said, ""), 0) < PRECISION[min(found)]:
        yield (
            f"config.json says {said}, and all weights are stored as {min(found)}: that is kept; --dtype casts all of them,"
            " --base DIR each as that model has it"
        )


def _quantised(tensors: Sequence[Tensor], config: Mapping[str, Any]) -> Iterator[str]:
    if config.get("quantization_config") and all(is_castable(t.dtype) for t in tensors if len(t.shape) > 1):
        yield (
            "config.json has a quantization_config, and no weight here is quantised: loaders will quantise them again,"
            " or expect packed weights; take it out of config.json to load them as they are"
        )
