"""What torch itself writes, as bytes."""

from __future__ import annotations

import io
from typing import Any

import torch


def saved(value: Any, **options: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out, **options)
    return out.getvalue()


def raw(tensor: torch.Tensor) -> bytes:
    """Return a tensor's elements, row by row."""
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    flat = flat.as_strided(flat.shape, (1,))  # one element is contiguous whatever its stride
    return b"" if not flat.numel() else flat.view(torch.uint8).numpy().tobytes()
