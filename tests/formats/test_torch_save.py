"""torch's older container: what torch itself writes, views of storages as versions before 1.0 wrote
them, and damage everywhere.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_save
from ckptsync.tensors import Extent, read
from tests.support.files_in_memory import MemoryFiles
from tests.support.torch_bytes import raw, saved

BASE = torch.arange(40, dtype=torch.float32)
STATE = {
    "whole": torch.randn(3, 5).bfloat16(),
    "view": BASE[7:19].view(3, 4),
    "same": BASE[7:19].view(3, 4),
    "column": torch.arange(12).reshape(3, 4)[:, 1],
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
    "eighth": torch.randn(4).to(torch.float8_e4m3fn),
    "number": 3,
}


def old(value: Any, **options: Any) -> bytes:
    return saved(value, _use_new_zipfile_serialization=False, **options)


def load(data: bytes) -> tuple[Any, Any, MemoryFiles]:
    files = MemoryFiles({"m.bin": data})
    return *torch_save.load(files, Extent("m.bin", 0, len(data))), files


@pytest.mark.parametrize("protocol", [2, 4])
def test_every_tensor_is_where_torch_put_it(protocol: int) -> None:
    value, container, files = load(old(STATE, pickle_protocol=protocol))
    for name, tensor in STATE.items():
        if isinstance(tensor, torch.Tensor):
            part = torch_save.part(files, container, value[name])
            assert (value[name].shape, part.checksum) == (tuple(tensor.shape), None)
            if part.strides is None:
                assert read(files, part.extent) == raw(tensor), name
    assert value["same"] == value["view"]
    column = torch_save.part(files, container, value["column"])
    assert (column.strides, column.extent.size) == ((4,), 9 * 8)


def test_a_file_cut_anywhere_or_grown_is_damaged() -> None:
    data = old({"a": torch.arange(5), "b": torch.ones(3)})
    assert load(data)
    for size in range(15, len(data)):
        with pytest.raises(Corrupt):
            load(data[:size])
    with pytest.raises(Corrupt, match="end at byte"):
        load(data + b"\0")


def test_pickles_longer_than_the_first_look_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_save, "_FIRST_LOOK", 64)
    assert load(old(STATE))[0]["number"] == 3
    with pytest.raises(Corrupt):
        load(old(STATE)[:600])


def by_hand(
    keys: list[str], numel: int, *, view: Any = None, machine: Any = None, told: int | None = None
) -> bytes:
    """One tensor of four floats in storage ``k``, by a pickler of our own."""

    class Pickler(pickle._Pickler):
        def persistent_id(self, value: Any) -> Any:
            return (
                ("storage", torch.FloatStorage, "k", "cpu", numel, view)
                if isinstance(value, Here)
                else None
            )

    from io import BytesIO

    out = BytesIO()
    for value in (torch_save.MAGIC, 1001, {"little_endian": True} if machine is None else machine):
        pickle.dump(value, out, 2)
    Pickler(out, 2).dump({"w": Tensor()})
    pickle.dump(keys, out, 2)
    count = numel if told is None else told
    return out.getvalue() + count.to_bytes(8, "little") + bytes(range(4 * numel))


class Here:
    """Where the storage is, in a pickle made by hand."""


class Tensor:
    def __reduce__(self) -> Any:
        return torch._utils._rebuild_tensor_v2, (Here(), 1, (3,), (1,), False, {})


def test_a_view_of_a_storage_lies_in_the_storage() -> None:
    value, container, files = load(by_hand(["k"], 9, view=("v", 2, 5)))
    assert value["w"].storage.numel == 5
    assert read(files, torch_save.part(files, container, value["w"]).extent) == bytes(range(12, 24))


@pytest.mark.parametrize(
    "view", [("v", 6, 5), ("v", -1, 5), ("k", 0, 5), ("v", 0), "v", ("v", 0, 2)]
)
def test_a_view_that_reaches_out_of_its_storage_or_has_anothers_name_is_refused(view: Any) -> None:
    with pytest.raises(Corrupt):
        load(by_hand(["k"], 9, view=view))


@pytest.mark.parametrize(
    "data",
    [
        by_hand(["j"], 4),
        by_hand(["k", "k"], 4),
        by_hand([], 4),
        by_hand(["k"], 4, told=5),
        by_hand(["k"], 4, told=-1 % (1 << 64)),
    ],
)
def test_storages_that_are_not_those_of_the_value_are_refused(data: bytes) -> None:
    with pytest.raises(Corrupt):
        load(data)


def test_other_machines_and_whole_modules_are_not_read() -> None:
    with pytest.raises(Unsupported, match="big-endian"):
        load(by_hand(["k"], 4, machine={"little_endian": False}))
    with pytest.raises(Unsupported):
        load(old(torch.nn.Linear(2, 2)))


def test_any_other_pickle_is_not_taken_for_one() -> None:
    files = MemoryFiles(
        {"a": pickle.dumps([1, 2], 2), "b": saved([1]), "c": b"\x80", "d": old([1])[:9], "e": b""}
    )
    found = {
        name: torch_save.is_legacy(files, Extent(name, 0, size))
        for name, size in files.sizes().items()
    }
    assert found == {"a": False, "b": False, "c": False, "d": True, "e": False}
