"""Element types: safetensors' names, torch's names for the same, and their sizes in bytes."""

from __future__ import annotations

from ckptsync.errors import Unsupported

# what numpy 1 can hold; it also bounds the work of multiplying a shape that comes from anyone
MOST_AXES = 32

ITEMSIZE = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "F8_E5M2FNUZ": 1,
    "F8_E4M3FNUZ": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "C64": 8,
    "F64": 8,
    "I64": 8,
    "U64": 8,
}

PRECISION = {"BF16": 1, "F16": 2, "F32": 3, "F64": 4}
"""Which of two copies is the more precise; of what is cast at all."""

# safetensors has them, too: elements share bytes, and nothing here cuts those
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}

FROM_TORCH = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}

STORAGES = {
    "BoolStorage": "BOOL",
    "ByteStorage": "U8",
    "CharStorage": "I8",
    "ShortStorage": "I16",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "IntStorage": "I32",
    "FloatStorage": "F32",
    "ComplexFloatStorage": "C64",
    "DoubleStorage": "F64",
    "LongStorage": "I64",
}


def from_torch(name: str) -> str:
    """Return ``BF16`` for ``bfloat16``; raises Unsupported for what safetensors cannot hold."""
    if name not in FROM_TORCH:
        raise Unsupported(f"torch.{name}: an element type that safetensors cannot hold")
    return FROM_TORCH[name]


def is_castable(dtype: str) -> bool:
    """Return whether elements may be cast: integers, bools, fp8 and complex numbers never are."""
    return dtype in PRECISION
