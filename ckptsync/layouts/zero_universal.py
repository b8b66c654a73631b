"""DeepSpeed's universal checkpoints: one merged master, ``zero/<parameter>/fp32.pt``, each.

Copies of the model files lie beside them, which `zero_universal_weights` reads.

``ds_to_universal`` also writes an ``fp32.pt`` for every other name of the module: the model's own
copy, cast to float32, integers too.  Those say less than the model file itself, and are left out.
Source: ``deepspeed/checkpoint/ds_to_universal.py``, 0.19.8.
"""

from __future__ import annotations

from collections.abc import Collection

from ckptsync.layouts.zero_files import UNIVERSAL, ZeroFiles, read_setup, trained_shapes
from ckptsync.tensors import Files, Tensor


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the directories with ``zero/<parameter>/fp32.pt`` in them."""
    parts = (name.rsplit("/", 3) for name in names if name.endswith(f"/{UNIVERSAL}"))
    return tuple(
        sorted({p[0] if p[3:] else "" for p in parts if p[-3:-2] == ["zero"] and len(p) > 2})
    )


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the model files, and the file of every parameter that they name."""
    zero = ZeroFiles(files, root)
    models = read_setup(zero).all_model_files(zero)
    zero.require(models)
    trained = [name for model in models for name in trained_shapes(zero.load(model))]
    return dict.fromkeys([*models, *map(zero.master_file, trained)])


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return parameters with their merged masters, and from the model files what else there is."""
    from ckptsync.layouts.zero_universal_weights import (  # noqa: PLC0415  # a merge's alone
        read_universal_weights,
    )

    return read_universal_weights(ZeroFiles(files, root))
