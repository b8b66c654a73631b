"""What ckptsync writes as ``torch.save`` would: torch opens it, and so does our own reader."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptsync.digest import crc32
from ckptsync.errors import Unsupported
from ckptsync.formats import torch_archive, torch_save, torch_zip
from ckptsync.formats.dtypes import FROM_TORCH
from ckptsync.formats.pickles import Name, PickledObject, Unknown
from ckptsync.formats.torch_archive import new_tensor
from ckptsync.tensors import Extent
from tests.support.files_in_memory import MemoryFiles

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 127, 128, -128, -129, 255, 1 << 40, -(1 << 63), 0.1, -0.0),
    *(float("inf"), "", "é\N{GRINNING FACE}", [], (), {}, [1, [2, (3,)]]),
    {"a": {"b": (None, "c")}, 1: 2.5},
)  # fmt: skip


def whole(value: object, data: bytes) -> bytes:
    header, ending = torch_archive.streamed(value, len(data))
    end = ending.encoded(crc32(data))
    assert len(end) == ending.size
    return header + data + end


def opened(data: bytes) -> Any:
    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_torch_and_the_reader_here_read_what_was_written(value: object) -> None:
    data = torch_archive.archive(value, lambda _: b"")
    assert opened(data) == value
    files = MemoryFiles({"f": data})
    assert torch_save.load(files, Extent("f", 0, len(data)))[0] == value


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16", "I64", "BOOL", "F64"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3, 4)])
def test_a_streamed_tensor_is_the_one_that_torch_loads(dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, {ours: name for name, ours in FROM_TORCH.items()}[dtype])
    tensor = torch.arange(24).reshape(2, 3, 4).to(kind)
    tensor = tensor if shape == (2, 3, 4) else tensor.reshape(-1)[: shape[0] if shape else 1]
    tensor = tensor.reshape(shape).contiguous()
    raw = bytes(tensor.clone().reshape(-1).view(torch.uint8).tolist())
    data = whole({"cat_dim": 0, "param": new_tensor(dtype, shape)}, raw)
    loaded = opened(data)
    assert loaded["cat_dim"] == 0
    assert (loaded["param"].dtype, loaded["param"].shape) == (kind, tensor.shape)
    assert torch.equal(loaded["param"], tensor)
    files = MemoryFiles({"f": data})
    value, container = torch_save.load(files, Extent("f", 0, len(data)))
    part = torch_save.part(files, container, value["param"])
    assert data[part.extent.start : part.extent.start + part.extent.size] == raw
    assert part.checksum is not None
    assert part.checksum.crc32 == crc32(raw)
    assert not part.extent.start % torch_archive.ALIGN


def test_tensors_of_a_value_get_records_of_their_own() -> None:
    bits = {"F32": b"\0\0\x80?", "I64": (7).to_bytes(8, "little")}
    value = {"lr": new_tensor("F32", (), "9"), "n": [new_tensor("I64", (1,), "9")]}
    loaded = opened(torch_archive.archive(value, lambda tensor: bits[tensor.dtype]))
    assert (loaded["lr"].item(), loaded["n"][0].tolist()) == (1.0, [7])


@pytest.mark.parametrize("size", [(4 << 30) - 1, (4 << 30) + 12])
def test_a_record_of_four_gib_has_zip64_fields(size: int, tmp_path: Path) -> None:
    header, ending = torch_archive.streamed(new_tensor("U8", (size,)), size)
    path = tmp_path / "large.pt"
    with path.open("wb") as file:  # with a hole
        file.write(header)
        file.seek(size, io.SEEK_CUR)
        file.write(ending.encoded(0x12345678))

    class OnDisk(MemoryFiles):
        def sizes(self) -> dict[str, int]:
            return {"large.pt": path.stat().st_size}

        def read_into(self, name: str, start: int, out: memoryview) -> None:
            with path.open("rb") as file:
                file.seek(start)
                assert file.readinto(out) == len(out)

    files = OnDisk({})
    archive = torch_zip.open_archive(files, Extent("large.pt", 0, path.stat().st_size))
    assert archive.records["data/0"].size == size
    assert archive.records["data/0"].crc == 0x12345678
    assert torch_zip.extent(files, archive, "data/0").start == len(header)
    assert zipfile.ZipFile(path).getinfo("archive/data/0").file_size == size
    loaded = torch.load(path, weights_only=True, mmap=True)
    assert (loaded.numel(), loaded[-1].item()) == (size, 0)


def test_what_no_reader_here_returns_is_refused() -> None:
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    shared: list[Any] = ["x" * 10_000]
    for _ in range(13):  # 80 MB once they are written out
        shared = [shared, shared]
    unknown = Unknown(Name("torchao.x", "Y"), ())
    for value in (object(), {1, 2}, unknown, 1 << 5000, deep, shared, new_tensor("U32", (1,))):
        with pytest.raises(Unsupported):
            torch_archive.archive(value, lambda _: b"")


def test_objects_are_made_as_the_pickle_made_them() -> None:
    scaler = PickledObject(Name("types", "SimpleNamespace"), (), {"cur_scale": 2.0})
    device = PickledObject(Name("torch", "device"), ("cpu",))
    made = pickle.loads(torch_archive.pickled([scaler, device, Name("torch", "float32")]))
    assert [made[0].cur_scale, made[1], made[2]] == [2.0, torch.device("cpu"), torch.float32]
