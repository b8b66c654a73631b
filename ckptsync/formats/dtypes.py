"""The element types of tensors: safetensors' names, torch's names, and their sizes in bytes.

All other modules use safetensors' names.
"""

from __future__ import annotations

from ckptsync.errors import Unsupported

# as many as numpy 1 has; the limit also bounds the work of multiplying the sizes of a hostile shape
MOST_AXES = 32

# safetensors' name, bytes, torch's name, torch's name of a storage where it has one
_TYPES = (
    ("BOOL", 1, "bool", "BoolStorage"),
    ("U8", 1, "uint8", "ByteStorage"),
    ("I8", 1, "int8", "CharStorage"),
    ("F8_E5M2", 1, "float8_e5m2", ""),
    ("F8_E4M3", 1, "float8_e4m3fn", ""),
    ("F8_E8M0", 1, "float8_e8m0fnu", ""),
    ("F8_E5M2FNUZ", 1, "float8_e5m2fnuz", ""),
    ("F8_E4M3FNUZ", 1, "float8_e4m3fnuz", ""),
    ("I16", 2, "int16", "ShortStorage"),
    ("U16", 2, "uint16", ""),
    ("F16", 2, "float16", "HalfStorage"),
    ("BF16", 2, "bfloat16", "BFloat16Storage"),
    ("I32", 4, "int32", "IntStorage"),
    ("U32", 4, "uint32", ""),
    ("F32", 4, "float32", "FloatStorage"),
    ("C64", 8, "complex64", "ComplexFloatStorage"),
    ("F64", 8, "float64", "DoubleStorage"),
    ("I64", 8, "int64", "LongStorage"),
    ("U64", 8, "uint64", ""),
)
# What safetensors has no name for: bytes, torch's name, torch's name of a storage where it has one.
_UNNAMED = (
    (4, "complex32", "ComplexHalfStorage"),
    (16, "complex128", "ComplexDoubleStorage"),
    (1, "quint8", "QUInt8Storage"),
    (1, "qint8", "QInt8Storage"),
    (4, "qint32", "QInt32Storage"),
    (1, "quint4x2", "QUInt4x2Storage"),
    (1, "quint2x4", "QUInt2x4Storage"),
    (1, "float4_e2m1fn_x2", ""),
    *((1, name, "") for name in ("bits1x8", "bits2x4", "bits4x2", "bits8")),
    (2, "bits16", ""),
    *((1, f"{sign}int{bits}", "") for sign in ("u", "") for bits in range(1, 8)),
)
ITEMSIZE = {name: size for name, size, _, _ in _TYPES}
FROM_TORCH = {torch: name for name, _, torch, _ in _TYPES}
STORAGES = {storage: name for name, _, _, storage in _TYPES if storage}
UNNAMED = {torch: size for size, torch, _ in _UNNAMED}
UNNAMED_STORAGES = {storage: torch for _, torch, storage in _UNNAMED if storage}

PRECISION = {"BF16": 1, "F16": 2, "F32": 3, "F64": 4}
"""The dtypes that may be cast; of two, the one with the higher number is more precise."""

# safetensors' dtypes whose elements share bytes: a tensor of them is refused
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def from_torch(name: str) -> str:
    """Return ``BF16`` for ``bfloat16``; raise Unsupported if safetensors has no such dtype."""
    if name not in FROM_TORCH:
        raise Unsupported(
            f"torch.{name}: an element type that safetensors cannot hold",
            hint=(
                "save it as complex64: tensor.to(torch.complex64)"
                if name.startswith("complex")
                else "save its bytes, tensor.view(torch.uint8), or the model dequantised"
            ),
        )
    return FROM_TORCH[name]


def is_castable(dtype: str) -> bool:
    """Return whether a merge may cast elements: not integers, bools, fp8 and complex numbers."""
    return dtype in PRECISION
