"""Tied weights: one copy where the model's configuration ties them and their bytes agree, else all of them.

Which names are tied is not written in any file; these are what transformers 5.23 has in its models' ``_tied_weights_keys``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blake3 import blake3

from ckptsync.merge.gather import stored
from ckptsync.merge.plan import Options, choose
from ckptsync.model import Files, Tensor

# The names under which transformers' models keep the output head, which `tie_word_embeddings` ties to the input embedding.
HEADS = (
    "lm_head.weight",
    "embed_out.weight",
    "proj_out.weight",
    "output_projection.weight",
    "lm_head.decoder.weight",
    "lm_head.out_proj.weight",
    "cls.predictions.decoder.weight",
    "predictions.decoder.weight",
    "generator_lm_head.weight",
    "vocab_projector.weight",
)
EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "embeddings.weight",
    "shared.weight",
)
# What has a second name beside it, under the same parent: encoder and decoder share one embedding, a head's bias has two owners.
SECOND = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "predictions.decoder.bias": "predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
_SECONDS = tuple(SECOND)
# Models whose configuration class ties them where the file says nothing: transformers before 5 did not write what is the default.
BY_DEFAULT = frozenset(
    "bart bert bloom camembert cohere cohere2 distilbert electra falcon gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text gpt2"  # noqa: SIM905
    " gpt_bigcode gpt_neo longt5 m2m_100 marian mbart openai-gpt opt pegasus roberta smollm3 starcoder2 switch_transformers t5 whisper xlm-roberta".split()
)
_NESTED = ("text_config", "decoder", "llm_config", "language_config", "thinker_config")


def is_tied(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` says that head and embedding are one; where a part of it contradicts another, nothing is said."""
    nested = [config[key] for key in _NESTED if isinstance(config.get(key), dict)]
    said = [c["tie_word_embeddings"] for c in (config, *nested) if "tie_word_embeddings" in c]
    return all(s is True for s in said) if said else str(config.get("model_type")) in BY_DEFAULT


def without_tied(
    tensors: Sequence[Tensor],
    files: Files,
    options: Options,
    config: Mapping[str, Any] | None,
    base: Mapping[str, Tensor] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The tensors to write, and notes for the reader.

    ``config``: what ``config.json`` says, if there is one; ``base``: the base model's tensors, if it is known.
    """
    if config is None or not is_tied(config):
        return tuple(tensors), _told(tensors) if config is None else ()
    found = _Ties(files, options, {t.name: t for t in tensors})
    found.drop_seconds()
    found.drop_heads()
    found.swap(base or {})
    return tuple(found.left.values()), tuple(found.notes)


def pairs(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Names that a model may have for one tensor, ``(second, first)``: what a file may lack of a tied model."""
    embeddings = [n for n in names if _ends(n, EMBEDDINGS)]
    yield from ((name, first) for name in names if (first := _first_of(name, names)))
    yield from ((head, embedding) for head in names if _ends(head, HEADS) for embedding in embeddings)


@dataclass(slots=True)
class _Ties:
    files: Files
    options: Options
    left: dict[str, Tensor]
    notes: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)

    def drop_seconds(self) -> None:
        for name in list(self.left):
            first = _first_of(name, self.left)
            if first and _alike(self.left[name], self.left[first]):
                self._drop(name, [self.left[first]])

    def drop_heads(self) -> None:
        embeddings = [t for t in self.left.values() if _ends(t.name, EMBEDDINGS)]
        for head in [t for t in self.left.values() if _ends(t.name, HEADS)]:
            alike = [e for e in embeddings if _alike(head, e)]
            if alike:
                self._drop(head.name, alike)

    def _drop(self, name: str, others: Sequence[Tensor]) -> None:
        same = [o for o in others if self._is_same(self.left[name], o)]
        if len(same) == 1:
            del self.left[name]
            self.notes.append(f"{name} is tied to {same[0].name}: one copy is kept")
        elif len(others) == 1:
            self.notes.append(f"{name} and {others[0].name} are tied by the configuration, but differ: both are kept")

    def swap(self, base: Mapping[str, Tensor]) -> None:
        """A head that stands alone gets the name that the base model has for the two, if that is proven."""
        heads = [t for t in self.left.values() if _ends(t.name, HEADS)]
        if len(heads) != 1 or any(_ends(n, EMBEDDINGS) for n in self.left):
            return
        head = heads[0]
        stored = [b for b in base.values() if _ends(b.name, EMBEDDINGS) and b.shape == head.shape]
        if len(stored) != 1 or head.name in base:
            self.notes.append(f"{head.name} is tied by the configuration, and its embedding is not there under any name of its own")
            return
        name = stored[0].name
        self.left = {n if n != head.name else name: t if n != head.name else replace(t, name=name) for n, t in self.left.items()}
        self.notes.append(f"{head.name} is written as {name}, which the base model has for the two")

    def _is_same(self, one: Tensor, other: Tensor) -> bool:
        return other.name == one.tied or one.name == other.tied or self._digest(one) == self._digest(other)

    def _digest(self, tensor: Tensor) -> str:
        if tensor.name not in self.digests:
            self.digests[tensor.name] = _digest(self.files, tensor, self.options)
        return self.digests[tensor.name]


def _ends(name: str, ends: tuple[str, ...]) -> bool:
    return name.endswith(ends) and any(name == end or name.endswith(f".{end}") for end in ends)


def _alike(one: Tensor, other: Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)


def _first_of(name: str, names: Collection[str]) -> str | None:
    """The first name of a tensor whose second name this may be, if it is there too."""
    for end, first in SECOND.items() if name.endswith(_SECONDS) else ():
        if _ends(name, (end,)):
            whole = name.removesuffix(end) + first
            return whole if whole in names else None
    return None


def _told(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Where no configuration says what a tie means, both names are written."""
    return tuple(
        f"{t.name} is tied to {t.tied} in the training: both are written, as no config.json ties them" for t in tensors if t.tied
    )


def _digest(files: Files, tensor: Tensor, options: Options) -> str:
    digester = blake3()
    for data in stored(files, choose(tensor, options.dtype)):
        digester.update(data)
    return digester.hexdigest()
