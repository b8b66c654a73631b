"""Small models and LoRA adapters of whole numbers: sums are exact, whatever order they are in."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from ckptsync.merger.cast import Array

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"
HEAD = "lm_head.weight"
SHAPES = {EMBED: (50, 24), Q: (24, 24), DOWN: (24, 40), NORM: (24,), HEAD: (50, 24)}
LIVE = "base_model.model."


def whole_numbers(seed: int, shape: tuple[int, ...], most: int = 8) -> Array:
    values: Array = np.random.default_rng(seed).integers(-most, most + 1, shape).astype("<f4")
    return values


def write_base(
    directory: Path, dtype: str = "<f4", files: int = 2, tensors: Mapping[str, Array] | None = None
) -> dict[str, Array]:
    """Write a model of several files; return its tensors."""
    directory.mkdir(parents=True)
    base = {n: whole_numbers(at, shape) for at, (n, shape) in enumerate(SHAPES.items())}
    base = {name: t.astype(dtype) for name, t in (base | dict(tensors or {})).items()}
    weight_map: dict[str, str] = {}
    for number in range(files):
        name = (
            f"model-{number + 1:05d}-of-{files:05d}.safetensors"
            if files > 1
            else "model.safetensors"
        )
        shard = {n: t for at, (n, t) in enumerate(base.items()) if at % files == number}
        save_file(shard, directory / name, {"format": "pt"})
        weight_map |= dict.fromkeys(shard, name)
    if files > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "architectures": ["OfTestsForCausalLM"],
        "model_type": "of_tests",
        "hidden_size": 24,
        "num_hidden_layers": 1,
        "vocab_size": 50,
        "tie_word_embeddings": False,
        "dtype": {"<f4": "float32", "<f2": "float16"}[dtype],
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text('{"of": "the base"}')
    return base


def pair(module: str, seed: int, rank: int = 4) -> dict[str, Array]:
    """Return the two factors of a linear module, under the names that peft saves."""
    rows, columns = SHAPES[f"{module}.weight"]
    return {
        f"{LIVE}{module}.lora_A.weight": whole_numbers(seed, (rank, columns), 2),
        f"{LIVE}{module}.lora_B.weight": whole_numbers(seed + 1, (rows, rank), 2),
    }


def write_adapter(directory: Path, tensors: Mapping[str, Array], **config: Any) -> Path:
    directory.mkdir(parents=True)
    save_file(dict(tensors), directory / "adapter_model.safetensors", {"format": "pt"})
    modules = sorted(
        {n.partition(".lora_")[0].rpartition(".")[2] for n in tensors if ".lora_" in n}
    )
    known = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": modules}
    (directory / "adapter_config.json").write_text(json.dumps(known | config))
    return directory


def delta(adapter: Mapping[str, Array], module: str, scale: float = 3.0) -> Array:
    """Return what a linear module's pair adds, by numpy."""
    its: Array = scale * (
        adapter[f"{LIVE}{module}.lora_B.weight"] @ adapter[f"{LIVE}{module}.lora_A.weight"]
    )
    return its


def read_model(directory: Path) -> dict[str, Array]:
    return {n: t for path in directory.glob("*.safetensors") for n, t in load_file(path).items()}
