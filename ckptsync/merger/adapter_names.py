"""Find the base's tensor for each name of an adapter.  Pure.

An adapter has the names of a model in memory, under the version of transformers that trained it;
the base's files have others (`ckptsync.layouts.weight_renaming`).  `Base.find` looks for a name as
it is, then as transformers has it in memory, then as an older file's name, then by the components
that all ways of naming have.  A name that could mean two tensors is not found.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptsync.errors import Unsupported
from ckptsync.layouts.weight_renaming import Place, places
from ckptsync.merger.adapter import PREFIX
from ckptsync.tensors import Tensor

_SYNONYMS = {"block_sparse_moe": "mlp"}  # Mixtral's, in files and in memory
_OPTIONAL_PARTS = frozenset(
    {"model", "language_model", "text_model", "vision_model", "transformer"}
)
# what a class with a head calls the model below it
_TOPS = frozenset(
    """
    bert roberta deberta electra distilbert albert mpnet longformer esm ernie rembert roformer
    convbert layoutlm layoutlmv3 vit deit beit swin wav2vec2 hubert wavlm gpt_neox rwkv backbone
    """.split()  # noqa: SIM905
)
_NOT_TEXT = re.compile(r"vis(ion|ual)|image|audio|speech|video")
_FACTOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B|"
    r"lora_magnitude_vector)(\.(?P<adapter>(?!weight$|bias$)[^.]+))?(\.(?P<end>weight|bias))?"
)
_TOKENS = re.compile(
    r"(?P<module>.+)\.token_adapter\.trainable_tokens_delta(\.(?P<adapter>[^.]+))?"
)
_BASE_LAYER = re.compile(r"(?P<module>.+?)(\.token_adapter)?((\.base_layer)+)\.(?P<end>[^.]+)")
_SAVED = re.compile(
    r"(?P<module>.+)\.modules_to_save(\.(?P<adapter>(?!weight$|bias$)[^.]+))?\.(?P<end>.+)"
)
_ORIGINAL = re.compile(r".+\.original_module\..+")
_REFUSED_KINDS = (
    *(("lora_E", "AdaLoRA"), ("ranknum", "AdaLoRA"), ("lora_diag", "KaSA"), ("vera_", "VeRA")),
    *(("ia3_", "IA3"), ("hada_", "LoHa"), ("lokr_", "LoKr"), ("oft_", "OFT"), ("boft_", "BOFT")),
    *(("prompt_e", "prompt tuning"), ("internal_xlora", "X-LoRA"), ("lora_ga", "LoRA-GA")),
    *(("lora_dropout", "LoRA's dropout"), ("lora_", "an unknown kind of LoRA")),
)


@dataclass(slots=True)
class Pair:
    """What an adapter has of one module: LoRA's factors, and what belongs to them."""

    a: Tensor | None = None
    b: Tensor | None = None
    bias: Tensor | None = None
    magnitude: Tensor | None = None
    is_embedding: bool = False


@dataclass(slots=True)
class Parts:
    """An adapter's tensors by what they are; modules under their names in memory.

    ``plain``: name of a parameter → what replaces it; ``base``: the same, of base layers.  Tensors
    that change nothing are left out.
    """

    pairs: dict[str, Pair] = field(default_factory=dict)
    tokens: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Tensor] = field(default_factory=dict)
    base: dict[str, Tensor] = field(default_factory=dict)


def split(tensors: Sequence[Tensor]) -> Parts:
    """Return an adapter's tensors by what they are, without peft's copies of untrained modules.

    If peft wrote a trained tensor under two names, the plain name's is returned. Raises Unsupported
    if they are of another kind than LoRA, or of several adapters.
    """
    parts = Parts()
    saved: dict[str, Tensor] = {}
    adapters: set[str] = set()
    for tensor in tensors:
        name = tensor.name.removeprefix(PREFIX)
        if match := _FACTOR.fullmatch(name):
            adapters.add(match["adapter"] or "")
            _set_field(parts.pairs.setdefault(match["module"], Pair()), match, tensor)
        elif match := _TOKENS.fullmatch(name):
            adapters.add(match["adapter"] or "")
            parts.tokens[match["module"]] = tensor
        elif match := _SAVED.fullmatch(name):
            adapters.add(match["adapter"] or "")
            saved[f"{match['module']}.{match['end']}"] = tensor
        elif _ORIGINAL.fullmatch(name):
            pass  # peft's copy of what was not trained
        elif match := _BASE_LAYER.fullmatch(name):
            parts.base[f"{match['module']}.{match['end']}"] = tensor
        else:
            kind = next(
                (
                    kind
                    for component in name.split(".")
                    for start, kind in _REFUSED_KINDS
                    if component.startswith(start)
                ),
                "",
            )
            if kind:
                raise Unsupported(
                    f"{tensor.name}: a tensor of {kind}, which is no LoRA as ckptsync sums it",
                    hint="merge it with peft",
                )
            parts.plain[name] = tensor
    if len(adapters - {""}) > 1:
        raise Unsupported(
            f"{len(adapters)} adapters in one file: {', '.join(sorted(adapters))}",
            hint="save one of them with save_pretrained, and merge that",
        )
    for name, tensor in saved.items():
        # with a resized vocabulary peft writes what it trained twice, under both names
        parts.plain.setdefault(name, tensor)
    return parts


def _set_field(pair: Pair, match: re.Match[str], tensor: Tensor) -> None:
    """Set the field of ``pair`` that ``match`` says ``tensor`` is, and perhaps ``is_embedding``."""
    kind = match["kind"]
    if kind == "lora_magnitude_vector":
        pair.magnitude = tensor
    elif match["end"] == "bias":
        pair.bias = tensor
    elif kind.endswith("_A"):
        pair.a = tensor
    else:
        pair.b = tensor
    pair.is_embedding = pair.is_embedding or kind.startswith("lora_embedding")


@dataclass(frozen=True, slots=True)
class Slot:
    """A tensor of the base's files that is, has or is a piece of what an adapter names.

    ``file``: what of the adapter's name the tensor is.  ``own``: what of the tensor the adapter's
    name is (experts that only the adapter has one by one).
    """

    tensor: Tensor
    file: Place
    own: Place | None = None


class Base:
    """The base's tensors, by the names that an adapter may have for them."""

    def __init__(self, tensors: Iterable[Tensor], config: Mapping[str, Any]) -> None:
        self.tensors = {t.name: t for t in tensors}
        self._config = config
        self._slots_in_memory: defaultdict[str, list[Slot]] = defaultdict(list)
        for name, where in places(self.tensors, config).items():
            for place in where:
                self._slots_in_memory[place.live].append(Slot(self.tensors[name], place))
        self._common_parts: dict[tuple[str, ...], set[str]] = {}
        self._children: dict[tuple[str, ...], dict[str, list[str]]] = {}

    def find(self, name: str) -> tuple[Slot, ...]:
        """Return the tensors that hold a parameter; empty if none or several could be meant."""
        if tensor := self.tensors.get(name):
            return (Slot(tensor, Place(name)),)
        if slots := self._slots_in_memory.get(name):
            return tuple(slots)
        # as if the name were a file's, of another version
        older_place, *_ = places((name,), self._config)[name]
        if slots := self._slots_in_memory.get(older_place.live):
            return _expert_slots(slots, older_place)
        self._index_names()
        for live, is_old in ((name, False), (older_place.live, True)):
            names = self._common_parts.get(_common_parts(live)) or ()
            if len(names) == 1:
                slots = self._slots_in_memory[next(iter(names))]
                return _expert_slots(slots, older_place) if is_old else tuple(slots)
        return ()

    def live_names(self) -> Collection[str]:
        """Return the names of the base's parameters in memory."""
        return self._slots_in_memory.keys()

    def parameters(self, module: str) -> dict[str, tuple[Slot, ...]]:
        """Return a module's parameters, without ``weight`` and ``bias``, by name.

        Such are stacked experts.  Empty if no module, or several, could be meant.
        """
        self._index_names()
        modules = self._children.get(_common_parts(module), {})
        if module not in modules and len(modules) != 1:
            return {}
        names = modules[module] if module in modules else next(iter(modules.values()))
        return {live.rpartition(".")[2]: tuple(self._slots_in_memory[live]) for live in names}

    def _index_names(self) -> None:
        """Index the names by the components that all ways of naming have.

        Only the first call does so, and most adapters need none.
        """
        if self._common_parts:
            return
        for live in self._slots_in_memory:
            module, _, parameter = live.rpartition(".")
            self._common_parts.setdefault(_common_parts(live), set()).add(live)
            if parameter not in ("weight", "bias"):
                children = self._children.setdefault(_common_parts(module), {})
                children.setdefault(module, []).append(live)


def _expert_slots(slots: Sequence[Slot], older_place: Place) -> tuple[Slot, ...]:
    """Return the slots of a name of an older file; empty if the base's tensors cannot hold it.

    It may be one expert of what the base has as one tensor.
    """
    if older_place.is_whole:
        return tuple(slots)
    if len(slots) == 1 and slots[0].file.is_whole:
        return (Slot(slots[0].tensor, slots[0].file, older_place),)
    return ()


def _common_parts(name: str) -> tuple[str, ...]:
    """Return the components of a name that all ways of naming have.

    The first says whether the name is of a part that is no text model's.
    """
    parts = name.split(".")
    if parts[0] in _TOPS:
        parts = parts[1:]
    is_not_text = any(_NOT_TEXT.search(part) for part in parts)
    return (
        "vision" if is_not_text else "",
        *(_SYNONYMS.get(part, part) for part in parts if part not in _OPTIONAL_PARTS),
    )
