"""Tensor names as the model has them: without torch's wrappers, one name for tied weights.

Sources: ``torch.compile`` (``_orig_mod``: torch/_dynamo/eval_frame.py), FSDP1
(``_fsdp_wrapped_module``: torch/distributed/fsdp/_common_utils.py), activation checkpointing
(``_checkpoint_wrapped_module``: torch/distributed/algorithms/_checkpoint/checkpoint_wrapper.py),
torch 2.13; Lightning (``_forward_module``); DistributedDataParallel and DeepSpeed's engine
(``module``).

Which names are tied is not written in any file; these are what transformers 5.23 has in its models'
``_tied_weights_keys``.
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
_SECONDS = tuple(SECOND)
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
    tensors: Sequence[Tensor], known: Collection[str] = ()
) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """Return the tensors under their model's own names, and a note if any was renamed.

    ``known``: names of the base model, where there is one.  Raises Unsupported where two would get
    one name.
    """
    names = clean_names([t.name for t in tensors], known)
    changed = [(stored, name) for stored, name in names.items() if stored != name]
    if not changed:
        return tuple(tensors), ()
    gone = {
        part
        for stored, name in changed
        for part in Counter(stored.split(".")) - Counter(name.split("."))
    }
    stored, name = changed[0]
    note = (
        f"{' and '.join(sorted(gone))} taken out of {len(changed)} names, such as {stored}: now"
        f" {name}"
    )
    return rename_tensors(tensors, names), (note,)


def rename_tensors(tensors: Iterable[Tensor], names: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Return each tensor under its new name, tied to the new name of the other.

    Raises Unsupported where two would get one name.
    """
    tensors = tuple(tensors)
    counts = Counter(names[t.name] for t in tensors)
    twice = sorted(t.name for t in tensors if counts[names[t.name]] > 1 and names[t.name] != t.name)
    if twice:
        raise Unsupported(
            f"{twice[0]}: would be renamed to {names[twice[0]]}, the name of another tensor",
            hint="the state that was saved holds one model twice: save only one of them",
        )

    def change(tensor: Tensor) -> Tensor:
        tied = names.get(tensor.tied, tensor.tied) if tensor.tied else None
        return replace(tensor, name=names[tensor.name], tied=tied)

    return tuple(t if names[t.name] == t.name else change(t) for t in tensors)


def clean_names(found: Sequence[str], known: Collection[str] = ()) -> dict[str, str]:
    """Return name as stored → name without wrappers.

    ``module`` is taken away where every name begins with it and the base model's names do not.
    """
    names = {name: _without_wrappers(name) for name in found}
    is_own = any(name.startswith(f"{OUTERMOST}.") for name in known)
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
    """Return whether all parts of ``config.json`` tie head and embedding, or its class does."""
    nested = [config[key] for key in _NESTED if isinstance(config.get(key), dict)]
    values = [c["tie_word_embeddings"] for c in (config, *nested) if "tie_word_embeddings" in c]
    return (
        all(value is True for value in values)
        if values
        else str(config.get("model_type")) in BY_DEFAULT
    )


def tied_pairs(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield ``(second, first)``, two names that some models use for one tied tensor."""
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

    Tied tensors are written once where the configuration ties them and their bytes agree.
    ``config``: what ``config.json`` says; ``base``: the base model's tensors; None if unknown.
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
    left = {t.name: t for t in tensors}
    notes: list[str] = []
    digests: dict[str, str] = {}

    def digest(tensor: Tensor) -> str:
        if tensor.name not in digests:
            digester = blake3()
            from ckptsync.merger.read_units import stored_bytes  # noqa: PLC0415 - the worker loads no numpy

            for data in stored_bytes(files, choose_copy(tensor, options.dtype)):
                digester.update(data)
            digests[tensor.name] = digester.hexdigest()
        return digests[tensor.name]

    def drop(one: Tensor, candidates: Iterable[Tensor]) -> None:
        """Drop a tensor that has the bytes of exactly one of the others of its shape and type."""
        others = [o for o in candidates if (o.shape, o.dtype) == (one.shape, one.dtype)]
        same = [
            o
            for o in others
            if o.name == one.tied or one.name == o.tied or digest(one) == digest(o)
        ]
        if len(same) == 1:
            del left[one.name]
            notes.append(f"{one.name} is tied to {same[0].name}: one copy is kept")
        elif len(others) == 1:
            notes.append(
                f"{one.name} and {others[0].name} are tied by the configuration, but differ: both"
                " are kept"
            )

    for name in list(left):
        if first := _first_of(name, left):
            drop(left[name], [left[first]])
    embeddings = [t for t in left.values() if ends_in(t.name, EMBEDDINGS)]
    for head in [t for t in left.values() if ends_in(t.name, HEADS)]:
        drop(head, embeddings)
    heads = [t for t in left.values() if ends_in(t.name, HEADS)]
    if len(heads) == 1 and not any(ends_in(name, EMBEDDINGS) for name in left):
        # a head that stands alone gets the name that the base model has for the two, if that is
        # proven
        head, known = heads[0], base or {}
        named = [
            b.name for b in known.values() if ends_in(b.name, EMBEDDINGS) and b.shape == head.shape
        ]
        if len(named) == 1 and head.name not in known:
            notes.append(
                f"{head.name} is written as {named[0]}, which the base model has for the two"
            )
            kept = (replace(t, name=named[0]) if t is head else t for t in left.values())
            return tuple(kept), tuple(notes)
        notes.append(
            f"{head.name} is tied by the configuration, but no embedding with a name of its own"
            " was found"
        )
    return tuple(left.values()), tuple(notes)


def ends_in(name: str, ends: tuple[str, ...]) -> bool:
    """Return whether a name is, or ends in, one of these whole components."""
    return name.endswith(ends) and any(name == end or name.endswith(f".{end}") for end in ends)


def _first_of(name: str, names: Collection[str]) -> str | None:
    """Return the first name of a tensor whose second name this may be, if it is there too."""
    for end, first in SECOND.items() if name.endswith(_SECONDS) else ():
        if ends_in(name, (end,)):
            whole = name.removesuffix(end) + first
            return whole if whole in names else None
    return None
