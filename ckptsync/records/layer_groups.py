"""The group of layers that a tensor belongs to (attention, mlp, norm, …), by its name alone.

Statistics of a model are shown by group, and frameworks name their modules differently. The modules
of a tensor's name are matched from right to left, and the first that a pattern knows decides: a
norm within an attention block is a norm.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, get_args

LayerGroup = Literal["embeddings", "attention", "mlp", "norm", "head", "lora_a", "lora_b", "other"]
LAYER_GROUPS: tuple[LayerGroup, ...] = get_args(LayerGroup)
"""In the order in which they are shown."""
_MODULES: tuple[tuple[LayerGroup, re.Pattern[str]], ...] = (
    ("lora_a", re.compile(r"lora_(embedding_)?a")),
    ("lora_b", re.compile(r"lora_(embedding_)?b")),
    ("norm", re.compile(r".*norm.*|ln|ln_?(\d+|f|q|k|v|pre|post|final)|ln_.*_(layer|post|pre)")),
    (
        "head",
        re.compile(
            r"(lm|v|q|value|score|cls|classification|output)_?head|score|classifier|cls|pooler"
            r"|qa_outputs|embed_out|output_layer|summary|value_head"
        ),
    ),
    ("attention", re.compile(r".*attn.*|.*attention.*|[qkvo]_proj|(qkv|query|key|value)(_.*)?")),
    (
        "mlp",
        re.compile(
            r".*mlp.*|.*moe.*|.*expert.*|.*ffn.*|feed_?forward.*|dense.+dense|intermediate|fc\d?"
            r"|(gate|up|down|gate_up)_proj|dense_\w+_to_\w+"
        ),
    ),
    ("embeddings", re.compile(r".*embed.*|wte|wpe|shared|.*_emb")),
)
_LONGEST = 500  # characters of a name that are looked at, from its end: it may be anyone's
_BESIDE_ATTENTION = re.compile(r"(.*\.)?layers?\.\d+\.output\.dense\..*", re.IGNORECASE)


@lru_cache(1 << 14)  # a run's checkpoints have the same names
def layer_group(name: str) -> LayerGroup:
    """Return the group of layers of a tensor, or `other` if no module of its name is known."""
    name = name[-_LONGEST:]
    for module in reversed(name.lower().split(".")):
        for group, pattern in _MODULES:
            if pattern.fullmatch(module):
                return group
    # BERT's second dense layer of a block has no name of its own
    return "mlp" if _BESIDE_ATTENTION.fullmatch(name) else "other"
