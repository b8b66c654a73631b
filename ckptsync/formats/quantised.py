"""Quantised tensors in pickles, refused by name: their storages mean nothing without the kernels that wrote them.

Names as ``torch/_utils.py``, ``torch/_tensor.py``, bitsandbytes 0.4x and torchao 0.x pickle them.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ckptsync.errors import Unsupported
from ckptsync.formats.pickles import Build, Name, made

_HINT = "save the model dequantised, or with save_pretrained in safetensors; an adapter on top of it can be merged alone"

_KINDS: dict[str, tuple[Name, ...]] = {
    "torch's quantized tensors": (Name("torch._utils", "_rebuild_qtensor"),),
    "bitsandbytes": tuple(
        Name(module, name)
        for module, name in (
            ("bitsandbytes.nn.modules", "Params4bit"),
            ("bitsandbytes.nn.modules", "Int8Params"),
            ("bitsandbytes.functional", "QuantState"),
        )
    ),
    "torchao": tuple(
        Name(module, name)
        for module, name in (
            ("torchao.dtypes.affine_quantized_tensor", "AffineQuantizedTensor"),
            ("torchao.quantization.linear_activation_quantized_tensor", "LinearActivationQuantizedTensor"),
            ("torchao.dtypes.nf4tensor", "NF4Tensor"),
            ("torchao.float8.float8_tensor", "Float8Tensor"),
            ("torchao.float8.fsdp_utils", "WeightWithDynamicFloat8CastTensor"),
            ("torchao.quantization.quantize_.workflows.float8.float8_tensor", "Float8Tensor"),
            ("torchao.quantization.quantize_.workflows.int4.int4_tensor", "Int4Tensor"),
        )
    ),
    "sparse tensors": (Name("torch._utils", "_rebuild_sparse_tensor"), Name("torch._utils", "_rebuild_sparse_csr_tensor")),
    "nested tensors": (Name("torch._utils", "_rebuild_nested_tensor"),),
    "tensors on the meta device": (Name("torch._utils", "_rebuild_meta_tensor_no_storage"),),
}


def _refusal(kind: str) -> Build:
    def refuse(name: Name, args: tuple[Any, ...]) -> NoReturn:
        raise Unsupported(f"{kind} cannot be read ({name.name}, {len(args)} arguments)", hint=_HINT)

    return refuse


REFUSED: dict[Name, Build] = {name: _refusal(kind) for kind, names in _KINDS.items() for name in names}
# What these are given: it is mentioned before they are made.
_GIVEN = (
    *(f"Q{kind}Storage" for kind in ("Int8", "UInt8", "Int32", "UInt4x2", "UInt2x4")),
    *(f"per_{what}_affine{params}" for what in ("tensor", "channel") for params in ("", "_float_qparams")),
    *("per_tensor_symmetric", "per_channel_symmetric"),
)
ALLOWED: dict[Name, Build] = {
    **REFUSED,
    **{Name("torch", name): made for name in _GIVEN},
    Name("torch.serialization", "_get_layout"): made,
}
