"""Small real files, cut short at every length."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.hostile.attack import CORRUPT, INCOMPLETE, Attack
from tests.support.files_in_memory import tree
from tests.support.vector import vector

SMALL = {  # vector → the file that is cut
    "raw-ds-zero2-odd": "mp_rank_00_model_states.pt",
    "dcp-fp8": ".metadata",
    "peft-adapter": "adapter_model.safetensors",
}


def attacks(_: str) -> Iterator[Attack]:
    for name in SMALL:
        files = tree(*vector(name).sources).content
        (cut,) = [path for path in files if Path(path).name == SMALL[name]][:1]
        for length in lengths(len(files[cut])):
            yield Attack(
                f"{name}-{length}", {**files, cut: files[cut][:length]}, (CORRUPT, INCOMPLETE)
            )


def lengths(size: int) -> list[int]:
    """A few near the ends and spread between, since each is a process: `test_hostile` itself cuts
    at every length, in memory.
    """
    return sorted(
        {*range(min(size, 10)), *range(0, size, max(1, size // 12)), *range(max(0, size - 5), size)}
    )
