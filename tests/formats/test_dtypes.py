"""The tables agree with torch and with the safetensors library."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import _TYPES

from ckptsync.errors import Unsupported
from ckptsync.formats.dtypes import ITEMSIZE, PRECISION, STORAGES, from_torch, is_castable


def test_every_name_of_the_library_is_known_by_torchs_name_and_size() -> None:
    for name, dtype in _TYPES.items():
        assert from_torch(str(dtype).removeprefix("torch.")) == name
        assert ITEMSIZE[name] == torch.empty(0, dtype=dtype).element_size()


@pytest.mark.filterwarnings("ignore:TypedStorage")
@pytest.mark.parametrize("storage", STORAGES)
def test_a_typed_storage_has_the_element_type_that_torch_gives_it(storage: str) -> None:
    assert STORAGES[storage] == from_torch(
        str(getattr(torch, storage)().dtype).removeprefix("torch.")
    )


@pytest.mark.parametrize("name", ["complex128", "qint8", "float4_e2m1fn_x2", "", "Float32"])
def test_what_safetensors_cannot_hold_is_unsupported(name: str) -> None:
    with pytest.raises(Unsupported, match="cannot hold"):
        from_torch(name)


def test_only_the_four_floats_are_cast() -> None:
    assert {d for d in ("I64", "BOOL", "U8", "F8_E4M3", "C64", *PRECISION) if is_castable(d)} == {
        "BF16",
        "F16",
        "F32",
        "F64",
    }
    assert sorted(PRECISION, key=PRECISION.__getitem__) == ["BF16", "F16", "F32", "F64"]
