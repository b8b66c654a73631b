"""The loading child's two loaders count the same values; it is run as a process in ``test_verify_loading``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors

from ckptsync.verify import child
from tests.plain_files import safetensors_file

NAN = {
    "f32": ("F32", (4,), np.array([1, np.nan, np.inf, -np.inf], np.float32).tobytes()),
    "bf16": ("BF16", (3,), np.array([0x7F80, 0x7FC0, 0x3F80], np.uint16).tobytes()),
    "f16": ("F16", (2, 2), np.array([1, np.nan, np.inf, 2], np.float16).tobytes()),
    "f64": ("F64", (), np.array(np.nan).tobytes()),
    "e4m3": ("F8_E4M3", (2,), b"\x7f\x7e"),
    "e5m2": ("F8_E5M2", (2,), b"\x7c\x7b"),
    "i64": ("I64", (1,), b"\xff" * 8),
    "none": ("F32", (0, 3), b""),
}
COUNTS = {"f32": 3, "bf16": 2, "f16": 2, "f64": 1, "e4m3": 1, "e5m2": 1}
SIZE = sum(len(data) for _, _, data in NAN.values())


def answer(path: Path, framework: str, load: Any) -> dict[str, Any]:
    return child._answer(safetensors.safe_open(str(path), framework), load)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_file(NAN))
    return path


def test_numpys_loader_counts_every_type(file: Path) -> None:
    assert answer(file, "numpy", child._Numpy(str(file))) == {"tensors": 8, "read": SIZE, "nonfinite": COUNTS, "more": 0}


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_torchs_loader_counts_the_same(file: Path) -> None:
    torch = importlib.import_module("torch")
    assert answer(file, "pt", child._Torch(torch)) == {"tensors": 8, "read": SIZE, "nonfinite": COUNTS, "more": 0}


def test_large_tensors_are_loaded_a_few_rows_at_a_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_PIECE", 16)
    pieces = list(child._Numpy(str(file))(safetensors.safe_open(str(file), "numpy"), "f16"))
    assert [len(p) for p in pieces] == [4, 4]
    assert [len(p) for p in child._Numpy(str(file))(safetensors.safe_open(str(file), "numpy"), "bf16")] == [6]


def test_so_many_names_are_told_and_the_rest_counted(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MOST", 2)
    found = answer(file, "numpy", child._Numpy(str(file)))
    assert (len(found["nonfinite"]), found["more"]) == (2, len(COUNTS) - 2)


def test_the_child_imports_little_of_ckptsync() -> None:
    """The interpreter that has torch may have no BLAKE3."""
    program = (
        "import sys, ckptsync.verify.child; print(*(m for m in sys.modules if m.startswith(('ckptsync', 'blake3', 'msgspec'))))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) == {
        "ckptsync",
        *(f"ckptsync.verify{name}" for name in ("", ".bits", ".child", ".inert", ".sandbox")),
    }


def test_the_best_values_of_lightnings_callbacks_begin_as_infinities_and_are_no_finding() -> None:
    inf = np.array([np.inf, np.inf, np.inf, np.inf], np.float32).view(np.uint8)
    found = {"callbacks.ModelCheckpoint.kth_value": inf[:4], "callbacks.EMA.weights": inf, "state_dict.w": inf[:4]}
    told = child.counted((name, "F32", piece) for name, piece in found.items())
    assert told["nonfinite"] == {"callbacks.EMA.weights": 4, "state_dict.w": 1}
    assert told["tensors"] == 3
