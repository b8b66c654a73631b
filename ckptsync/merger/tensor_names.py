"""Give tensors the names that the model has: without torch's wrappers, one name for tied weights.

Wrappers such as ``torch.compile`` put a part of their own into the names of a state dict, and a
tied tensor has two names, of which `save_pretrained` writes one.  Which names are tied is not
written in any file; these are what transformers 5.23 has in its models' ``_tied_weights_keys``.

Sources: ``torch.compile`` (``_orig_mod``: torch/_dynamo/eval_frame.py), FSDP1
(``_fsdp_wrapped_module``: torch/distributed/fsdp/_common_utils.py), activation checkpointing
(``_checkpoint_wrapped_module``: torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py),
torch 2.13; Lightning (``_forward_module``); DistributedDataParallel and DeepSpeed's engine
(``module``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from blake3 import blake3

from ckptsync.errors import Unsupported
from ckptsync.merger.plan import MergeOptions, choose_copy
from ckptsync.tensors import Files, Tensor

WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}
)
OUTERMOST = "module"  # a name that a model may well have for a part of itself

# The names under which transformers' models keep the output head, which `tie_word_embeddings` ties
# to the input embedding.
HEADS = (
    *("lm_head.weight", "embed_out.weight", "proj_out.weight", "output_projection.weight"),
    *("lm_head.decoder.weight", "lm_head.out_proj.weight", "cls.predictions.decoder.weight"),
    *("predictions.decoder.weight", "generator_lm_head.weight", "vocab_projector.weight"),
)
EMBEDDINGS = (
    *("embed_tokens.weight", "wte.weight", "word_embeddings.weight"),
    *("embed_in.weight", "embeddings.weight", "shared.weight"),
)
# Second names of a tensor, under the same parent: encoder and decoder share one embedding, a head's
# bias has two owners.
SECOND = {
    "encoder.embed_tokens.weight": "shared.weight",
    "decoder.embed_tokens.weight": "shared.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "predictions.decoder.bias": "predictions.bias",
    "lm_head.decoder.bias": "lm_head.bias",
}
_SECOND_ENDS = tuple(SECOND)
# Models whose configuration class ties them where the file says nothing: transformers before 5
# wrote no defaults.
BY_DEFAULT = frozenset(
    """
    bart bert bloom camembert cohere cohere2 distilbert electra falcon gemma gemma2 gemma3
    gemma3_text gemma3n gemma3n_text gpt2 gpt_bigcode gpt_neo longt5 m2m_100 marian mbart
    openai-gpt opt pegasus roberta smollm3 starcoder2 switch_transformers t5 whisper xlm-roberta
    """.split()  # noqa: SIM905
)
_NESTED = ("text_config", "decoder", "llm_config", "language_config", "thinker_config")


def strip_wrappers(
    tensors: Sequence[Tensor], base_names: Collection[str] = ()
) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Return the tensors under their model's own names, and a note if any was renamed.

    ``base_names``: names of the base model, if there is one.  Raises Unsupported if two tensors
    would get one name.
    """
    names = clean_names([t.name for t in tensors], base_names)
    changed = [(stored, name) for stored, name in names.items() if stored != name]
    if not changed:
        return tuple(tensors), ()
    wrappers = {
        part
        for stored, name in changed
        for part in Counter(stored.split(".")) - Counter(name.split("."))
    }
    stored, name = changed[0]
    note = (
        f"{' and '.join(sorted(wrappers))} taken out of {len(changed)} names, such as {stored}: now"
        f" {name}"
    )
    return rename_tensors(tensors, names), (note,)


def rename_tensors(tensors: Iterable[Tensor], names: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Return each tensor under its new name; where it changes, ``tied`` becomes a new name, too.

    ``names``: of every tensor, unchanged ones too.  Raises Unsupported if two would get one name.
    """
    tensors = tuple(tensors)
    counts = Counter(names[t.name] for t in tensors)
    clashing = sorted(
        t.name for t in tensors if counts[names[t.name]] > 1 and names[t.name] != t.name
    )
    if clashing:
        raise Unsupported(
            f"{clashing[0]}: would be renamed to {names[clashing[0]]}, the name of another tensor",
            hint="the state that was saved holds one model twice: save only one of them",
        )

    def change(tensor: Tensor) -> Tensor:
        """Return a tensor with both of its names replaced."""
        tied = names.get(tensor.tied, tensor.tied) if tensor.tied else None
        return replace(tensor, name=names[tensor.name], tied=tied)

    return tuple(t if names[t.name] == t.name else change(t) for t in tensors)


def clean_names(stored_names: Sequence[str], base_names: Collection[str] = ()) -> dict[str, str]:
    """Return name as stored → name without wrappers.

    ``module`` is taken away as often as every name begins with it, if no base model's does.  Two
    names may become the same.
    """
    names = {name: _without_wrappers(name) for name in stored_names}
    is_own = any(name.startswith(f"{OUTERMOST}.") for name in base_names)
    while names and not is_own and all(name.startswith(f"{OUTERMOST}.") for name in names.values()):
        names = {stored: name.partition(".")[2] for stored, name in names.items()}
    return names


def _without_wrappers(name: str) -> str:
    """Return a name without wrappers.  A name that ends in one is not wrapped."""
    if not any(wrapper in name for wrapper in WRAPPERS):  # most names, and there may be a million
        return name
    parts = name.split(".")
    return (
        name if parts[-1] in WRAPPERS else ".".join(part for part in parts if part not in WRAPPERS)
    )


def is_tied(config: Mapping[str, Any]) -> bool:
    """Return whether ``config.json`` ties head and embedding.

    All sections that say something must tie them; if none does, ``model_type`` decides
    (`BY_DEFAULT`).
    """
    nested = [config[key] for key in _NESTED if isinstance(config.get(key), dict)]
    values = [c["tie_word_embeddings"] for c in (config, *nested) if "tie_word_embeddings" in c]
    return (
        all(value is True for value in values)
        if values
        else str(config.get("model_type")) in BY_DEFAULT
    )


def tied_pairs(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield ``(second, first)``: two of ``names`` that some models use for one tied tensor."""
    embeddings = [n for n in names if ends_in(n, EMBEDDINGS)]
    yield from ((name, first) for name in names if (first := _first_of(name, names)))
    yield from (
        (head, embedding) for head in names if ends_in(head, HEADS) for embedding in embeddings
    )


def has_head(names: Iterable[str]) -> bool:
    """Return whether one of the names is that of an output head."""
    return any(ends_in(name, HEADS) for name in names)


def drop_tied(
    tensors: Sequence[Tensor],
    files: Files,
    options: MergeOptions,
    config: Mapping[str, Any] | None,
    base: Mapping[str, Tensor] | None = None,
) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Return the tensors to write, and notes.

    If ``config`` ties tensors whose bytes, which are read, agree, one is returned; a head without
    embedding is renamed as ``base`` has the two.  ``config``: what ``config.json`` says; ``base``:
    the base model's tensors; None if unknown.  Raises what ``files`` raise, and as `choose_copy`.
    """
    if config is None:
        return tuple(tensors), tuple(
            f"{t.name} is tied to {t.tied} in the training: both are written, as no config.json"
            " ties them"
            for t in tensors
            if t.tied
        )
    if not is_tied(config):
        return tuple(tensors), ()
    ties = _Ties(tensors, files, options)
    for name in list(ties.remaining):
        if first := _first_of(name, ties.remaining):
            ties.drop(ties.remaining[name], [ties.remaining[first]])
    embeddings = ties.ending_in(EMBEDDINGS)
    for head in ties.ending_in(HEADS):
        ties.drop(head, embeddings)
    heads = ties.ending_in(HEADS)
    if len(heads) == 1 and not ties.ending_in(EMBEDDINGS):
        ties.rename_lone_head(heads[0], base or {})
    return tuple(ties.remaining.values()), tuple(ties.notes)


class _Ties:
    """The tensors that are written, as tied ones are dropped, and notes on that."""

    def __init__(self, tensors: Iterable[Tensor], files: Files, options: MergeOptions) -> None:
        self.remaining = {t.name: t for t in tensors}
        self.notes: list[str] = []
        self._files, self._options = files, options
        self._digests: dict[str, str] = {}

    def ending_in(self, ends: tuple[str, ...]) -> list[Tensor]:
        """Return the remaining tensors whose names end in one of these."""
        return [t for t in self.remaining.values() if ends_in(t.name, ends)]

    def drop(self, tensor: Tensor, candidates: Iterable[Tensor]) -> None:
        """Drop a tensor that has the bytes of exactly one candidate of its shape and type.

        The bytes of both are read once, unless the training ties them.  A note says what is
        dropped, or that a single candidate has other bytes.  Raises what the files raise.
        """
        similar = [c for c in candidates if (c.shape, c.dtype) == (tensor.shape, tensor.dtype)]
        identical = [
            c
            for c in similar
            if c.name == tensor.tied
            or tensor.name == c.tied
            or self._digest(tensor) == self._digest(c)
        ]
        if len(identical) == 1:
            del self.remaining[tensor.name]
            self.notes.append(f"{tensor.name} is tied to {identical[0].name}: one copy is kept")
        elif len(similar) == 1:
            self.notes.append(
                f"{tensor.name} and {similar[0].name} are tied by the configuration, but differ:"
                " both are kept"
            )

    def rename_lone_head(self, head: Tensor, base: Mapping[str, Tensor]) -> None:
        """Give a head without embedding the name that the base model has for the two.

        Only if ``base`` has exactly one embedding of the head's shape, and no tensor of the head's
        name.  A note says what was done, or that no such name was found.
        """
        names = [
            t.name for t in base.values() if ends_in(t.name, EMBEDDINGS) and t.shape == head.shape
        ]
        if len(names) != 1 or head.name in base:
            self.notes.append(
                f"{head.name} is tied by the configuration, but no embedding with a name of its own"
                " was found"
            )
            return
        self.notes.append(
            f"{head.name} is written as {names[0]}, which the base model has for the two"
        )
        renamed = (replace(t, name=names[0]) if t is head else t for t in self.remaining.values())
        self.remaining = {t.name: t for t in renamed}

    def _digest(self, tensor: Tensor) -> str:
        """Return the BLAKE3 of a tensor's bytes; only the first call reads them, and may raise."""
        if tensor.name not in self._digests:
            from ckptsync.merger.read_units import (  # noqa: PLC0415 - the worker loads no numpy
                stored_bytes,
            )

            digester = blake3()
            for data in stored_bytes(self._files, choose_copy(tensor, self._options.dtype)):
                digester.update(data)
            self._digests[tensor.name] = digester.hexdigest()
        return self._digests[tensor.name]


def ends_in(name: str, ends: tuple[str, ...]) -> bool:
    """Return whether a name is, or ends in, one of these whole components."""
    return name.endswith(ends) and any(name == end or name.endswith(f".{end}") for end in ends)


def _first_of(name: str, names: Collection[str]) -> str | None:
    """Return the first name of a tensor whose second name this may be; None if it is absent."""
    for end, first_end in SECOND.items() if name.endswith(_SECOND_ENDS) else ():
        if ends_in(name, (end,)):
            whole = name.removesuffix(end) + first_end
            return whole if whole in names else None
    return None
