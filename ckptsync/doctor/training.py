"""What a training's own file says of how it saves: LLaMA-Factory's YAML, TrainingArguments as JSON, a DeepSpeed or accelerate configuration.

Only the keys in `KEYS` are taken, and no URLs: nothing else of the file is told to anybody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsync import parsing
from ckptsync.config.yaml_lines import LIMIT, parse
from ckptsync.errors import ConfigError, Corrupt

KEYS = (
    "output_dir",
    "save_on_each_node",
    "save_total_limit",
    "save_steps",
    "finetuning_type",
    "ray_run_name",
    "ray_num_workers",
    "model_name_or_path",
)


def read(path: Path) -> dict[str, str]:
    """Texts by key, with ``zero_stage`` and ``gather_16bit``; raises ConfigError where the file cannot be read.

    A DeepSpeed configuration that it names is read too; where that is not there it is the training's to say so.
    """
    said = _mapping(path)
    told = {key: text for key in KEYS if key in said and "://" not in (text := _text(said[key]))}
    inner = said.get("deepspeed")
    if isinstance(inner, str) and inner:
        there = next((p for p in (Path(inner), path.parent / inner) if p.is_file()), None)
        inner = _mapping(there) if there else {}
    for config in (said, inner, said.get("deepspeed_config")):
        if isinstance(config, Mapping):
            told |= dict(_zero(config))
    return told


def _zero(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """ZeRO's stage, and whether it gathers the model when it is saved: DeepSpeed does not unless it is told (runtime/zero/config.py)."""
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        yield "zero_stage", _text(zero.get("stage", ""))
        names = ("stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
        yield "gather_16bit", _text(next((zero[name] for name in names if name in zero), False))
    elif "zero_stage" in config:  # accelerate's own words
        yield "zero_stage", _text(config["zero_stage"])
        yield "gather_16bit", _text(config.get("zero3_save_16bit_model", False))


def _mapping(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(LIMIT + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}", hint="--training names the training's own YAML or JSON") from e
    try:
        values = parsing.parse(text, os.fspath(path))
    except Corrupt:
        values = parse(text, os.fspath(path)).values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a mapping of keys to values", hint="--training names the training's own YAML or JSON")
    return {str(key): value for key, value in values.items()}


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value) if isinstance(value, (str, int, float)) else ""
