"""Files in an output directory that name its newest checkpoint: trainers write them anew with every save, so no store keeps them.  Pure.

DeepSpeed reads ``latest`` where it is given no tag (`deepspeed.runtime.engine`, load_checkpoint); verl and Megatron read
``latest_checkpointed_iteration.txt``.  The Hugging Face Trainer looks at the directories' names and times.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from ckptsync.scan import family_of

_STATES = re.compile(r"(bf16_|fp16_)?(zero_pp_rank_[0-9]+_)?mp_rank_[0-9]+_(model|optim)_states\.pt")
_ITERATION = re.compile(r"(?:global_step_|iter_)0*([0-9]+)")


def pointers(checkpoint: str, paths: Collection[str]) -> Mapping[str, bytes]:
    """Name beside the checkpoint's directory → content, for one with these files."""
    if found := _ITERATION.fullmatch(checkpoint):
        return {"latest_checkpointed_iteration.txt": found[1].encode()}
    is_tag = family_of(checkpoint) == "deepspeed" and any(map(_STATES.fullmatch, paths))
    return {"latest": checkpoint.encode()} if is_tag else {}
