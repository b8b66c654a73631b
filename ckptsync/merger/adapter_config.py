"""Read ``adapter_config.json`` for a sum: the kind of adapter, its ranks and scales.  Pure.

Only plain LoRA is a sum that ckptsync can compute.  `check_kind` refuses every other kind by its
name; `Scales` says with which factor a module's product is added.  Follows peft 0.21.2:
``utils/peft_types.py``, ``tuners/lora/{config,model,layer}.py``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.merger.model_files import ADAPTER_CONFIG

# Every other kind of peft 0.21.2.  Of these peft itself can merge some; none is a plain sum.
_KINDS = {
    "ADALORA": "AdaLoRA",
    "ADAMSS": "AdaMSS",
    "BEFT": "BEFT",
    "BOFT": "BOFT",
    "BONE": "Bone",
    "C3A": "C3A",
    "DEFT": "DEFT",
    "DELORA": "DeLoRA",
    "FOURIERFT": "FourierFT",
    "FROD": "FRoD",
    "GLORA": "GLoRA",
    "GRALORA": "GraLoRA",
    "HIRA": "HiRA",
    "HRA": "HRA",
    "IA3": "IA3",
    "LILY": "Lily",
    "LN_TUNING": "layer-norm tuning",
    "LOHA": "LoHa",
    "LOKR": "LoKr",
    "MISS": "MiSS",
    "OFT": "OFT",
    "OSF": "OSF",
    "PEANUT": "PEANuT",
    "POLY": "Poly",
    "PSOFT": "PSOFT",
    "PVERA": "PVeRA",
    "RANDLORA": "RandLoRA",
    "ROAD": "RoAd",
    "SHADOW": "Shadow",
    "SHIRA": "SHiRA",
    "SUPERTUNING": "SuperTuning",
    "TINYLORA": "TinyLoRA",
    "TRAINABLE_TOKENS": "trainable tokens alone, without LoRA",
    "UNILORA": "UniLoRA",
    "VBLORA": "VB-LoRA",
    "VERA": "VeRA",
    "WAVEFT": "WaveFT",
    "XLORA": "X-LoRA",
}
# what these train is no change of a weight
_PROMPTS = {
    "ADAPTION_PROMPT": "LLaMA-Adapter's prompts",
    "CARTRIDGE": "Cartridge",
    "CPT": "CPT",
    "MULTITASK_PROMPT_TUNING": "multitask prompt tuning",
    "PREFIX_TUNING": "prefix tuning",
    "PROMPT_TUNING": "prompt tuning",
    "P_TUNING": "P-tuning",
}
_VARIANTS = {
    "alora_invocation_tokens": ("aLoRA", "it acts only behind its invocation tokens"),
    "arrow_config": ("Arrow", "it routes between adapters for each token"),
    "use_bdlora": ("BD-LoRA", "its factors are block-diagonal"),
    "kasa_config": ("KaSA", "it truncates the base"),
    "layer_replication": ("layer_replication", "the model has more layers than its base"),
    "use_qalora": ("QALoRA", "its inputs are pooled by groups"),
}
# Initialisations that take their first product out of the base, or replace the base.
_CHANGED_BASE = {
    "pissa": "PiSSA",
    "olora": "OLoRA",
    "corda": "CorDA",
    "lora_ga": "LoRA-GA",
    "loftq": "LoftQ",
}
_SAME_BASE = frozenset({"gaussian", "eva", "orthogonal", "mica", "true", "false"})
# a group that is repeated and holds a repetition: matching may take exponential time
_NESTED = re.compile(r"[*+}]\??\)+[*+{]")
_PACKED_BASES = re.compile(r"4bit|8bit|gptq|awq|int4|int8|fp8|aqlm", re.IGNORECASE)
_MOST_RANK = 1 << 31
_DAMAGED = "take adapter_config.json from the training again"
_BESIDE = "serve it beside its base, with peft"
_WITH_PEFT = "merge it with peft: PeftModel.from_pretrained(base, adapter).merge_and_unload()"


def check_kind(config: Mapping[str, Any], *, is_changed_base: bool) -> None:
    """Raise Unsupported if the adapter is no sum of low-rank products, with the name of its kind.

    ``is_changed_base``: the base is the one that an initialisation such as PiSSA left for the
    training; otherwise such an initialisation is refused, too.
    """
    kind = str(config.get("peft_type", "")).rpartition(".")[2].upper()
    if kind in _PROMPTS:
        raise Unsupported(
            f"{_PROMPTS[kind]}: such an adapter changes no weight of its base",
            hint=_BESIDE,
        )
    if kind != "LORA":
        name = _KINDS.get(kind, f"peft_type {kind or 'missing'}")
        raise Unsupported(f"{name}: ckptsync sums LoRA adapters only", hint=_WITH_PEFT)
    for key, (name, why) in _VARIANTS.items():
        if config.get(key):
            raise Unsupported(f"{name}: no sum gives the same model: {why}", hint=_BESIDE)
    initialisation = str(config.get("init_lora_weights", True)).lower()
    start = next((s for s in _CHANGED_BASE if initialisation.startswith(s)), "")
    if start and not is_changed_base:
        raise Unsupported(
            f"{_CHANGED_BASE[start]} (init_lora_weights: {initialisation}): the adapter was trained"
            " on a changed base, and its sum with the original is another model",
            hint=(
                "save the adapter with path_initial_model_for_weight_conversion, which makes it a"
                " plain one, or give the base that it was trained on with --changed-base"
            ),
        )
    if not start and initialisation not in _SAME_BASE:
        raise Unsupported(
            f"init_lora_weights {initialisation!r}: an initialisation that ckptsync does not know",
            hint=_WITH_PEFT,
        )


def notes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a note if the adapter was trained on a quantised base, else nothing."""
    base = config.get("base_model_name_or_path")
    if isinstance(base, str) and (match := _PACKED_BASES.search(base)):
        note = (
            f"the adapter was trained on {base} ({match[0]}): the sum with the unquantised base is"
            " usual, and not the model that was trained; evaluate it"
        )
        return (note,)
    return ()


def names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names in a field that may hold one name or a list of names."""
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    return tuple(name for name in values if isinstance(name, str))


@dataclass(slots=True)
class Scales:
    """Ranks and scales by module; `scale` appends to ``warnings``."""

    rank: int
    alpha: float
    is_rslora: bool
    ranks: tuple[tuple[str, re.Pattern[str], float], ...] = ()
    alphas: tuple[tuple[str, re.Pattern[str], float], ...] = ()
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Scales:
        """Return the scales of a configuration; rank and alpha are 8 if it does not say them.

        Raises Corrupt if one is no valid number or a pattern is invalid, Unsupported for patterns
        that may take exponential time to match.
        """
        rank, alpha = config.get("r", 8), config.get("lora_alpha", 8)
        if type(rank) is not int or not 1 <= rank < _MOST_RANK:
            raise _value_error("r", rank)
        if not _is_number(alpha):
            raise _value_error("lora_alpha", alpha)
        return cls(
            rank,
            float(alpha),
            bool(config.get("use_rslora")),
            _patterns(config, "rank_pattern"),
            _patterns(config, "alpha_pattern"),
        )

    def scale(self, module: str, rank: int) -> float:
        """Return the scale of a module whose factors have ``rank``.

        The first pattern of the file that matches counts, as in peft; a warning is recorded if
        several match with different values.  Raises Corrupt unless ``rank`` is that of any of them,
        or the configuration's if none matches.
        """
        ranks = self._matching_values("rank_pattern", self.ranks, module, self.rank)
        if rank not in ranks:
            raise Corrupt(
                f"{ADAPTER_CONFIG}: rank {ranks[0]:g}, and {module} has factors of rank {rank}",
                hint="it is another adapter's: give this one's directory",
            )
        alpha = self._matching_values("alpha_pattern", self.alphas, module, self.alpha)[0]
        return alpha / math.sqrt(rank) if self.is_rslora else alpha / rank

    def _matching_values(
        self,
        key: str,
        patterns: tuple[tuple[str, re.Pattern[str], float], ...],
        module: str,
        default: float,
    ) -> list[float]:
        """Return the values of all patterns that match a module, in order; else ``default`` alone.

        Records a warning if the values differ.
        """
        matches = [(text, value) for text, pattern, value in patterns if pattern.match(module)]
        values = [value for _, value in matches] or [default]
        if len(set(values)) > 1:
            self.warnings.append(
                f"{key}: {len(matches)} patterns match {module}, with the values"
                f" {', '.join(f'{value:g}' for value in values)}; the first of the file counts, as"
                " in peft, which writes them in alphabetical order: that of the training may have"
                " been another"
            )
        return values


def _patterns(
    config: Mapping[str, Any], key: str
) -> tuple[tuple[str, re.Pattern[str], float], ...]:
    """Return the text, the compiled pattern and the value of each entry of ``key``.

    Raises Corrupt for invalid entries, Unsupported for patterns with nested repetition.
    """
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise _value_error(key, patterns)
    result = []
    for text, value in patterns.items():
        if not _is_number(value) or (key == "rank_pattern" and (value < 1 or value != int(value))):
            raise _value_error(f"{key}: {text}", value)
        if _NESTED.search(text):
            raise Unsupported(
                f"{ADAPTER_CONFIG}: {key}: {text!r:.100} repeats what is repeated in it, which may"
                " take for ever to match",
                hint="write the pattern without nested repetition",
            )
        try:
            result.append((text, re.compile(rf"(.*\.)?({text})$"), float(value)))
        except re.error as e:
            raise Corrupt(
                f"{ADAPTER_CONFIG}: {key}: {text!r:.100} is no pattern: {e}", hint=_DAMAGED
            ) from e
    return tuple(result)


def _is_number(value: object) -> bool:
    """Return whether a value is an int or a float, no bool, and of less than 1e30."""
    return type(value) in (int, float) and abs(value) < 1e30  # type: ignore[arg-type]


def _value_error(key: str, value: object) -> Corrupt:
    """Return the error for a value that a key cannot have."""
    return Corrupt(f"{ADAPTER_CONFIG}: {key} is {value!r:.100}, which cannot be", hint=_DAMAGED)
