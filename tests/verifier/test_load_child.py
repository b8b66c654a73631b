"""torch's files are loaded with ``weights_only`` and no fallback.

What is no tensor becomes an object that can do nothing.
"""

from __future__ import annotations

import collections
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptsync.verifier import load_child
from ckptsync.verifier.load_child import Refused, count, load_inert, nonfinite, storages
from tests.support.files_in_memory import safetensors_file

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")


class Evil:
    """Its pickle calls a function of the standard library."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


def saved(path: Path, value: Any, **how: Any) -> str:
    torch.save(value, path, **how)
    return str(path)


def found(file: Any) -> dict[str, Any]:
    return count(storages(load_inert(torch, file), torch))


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_are_counted_once_a_storage_wherever_they_are(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    a = torch.tensor([1.0, float("nan"), float("inf")])
    value = {
        "model": {"a": a, "tied": a[1:]},
        "rest": [
            torch.zeros(2, dtype=torch.int64),
            (torch.tensor(float("nan"), dtype=torch.bfloat16),),
        ],
    }
    told = found(saved(tmp_path / "f.pt", value, _use_new_zipfile_serialization=not legacy))
    assert told == {
        "tensors": 3,
        "read": 12 + 16 + 2,
        "nonfinite": {"model.a": 2, "rest.1.0": 1},
        "more": 0,
    }


def test_sparse_and_foreign_objects_are_looked_into(tmp_path: Path) -> None:
    space = collections.namedtuple("space", "a")  # noqa: PYI024 - a class that only this module has
    globals()["space"], space.__module__, space.__qualname__ = space, __name__, "space"
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, float("inf")], (3,), check_invariants=True)
    told = found(
        saved(tmp_path / "f.pt", [sparse, space(torch.tensor([float("nan")])), np.arange(3)])
    )
    assert told["nonfinite"] == {"0": 1, "1.0": 1}


@pytest.mark.filterwarnings("ignore:Sparse C")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_tensors_are_looked_into(tmp_path: Path, layout: str) -> None:
    blocks = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    dense = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    told = found(saved(tmp_path / "f.pt", {"a": getattr(dense, f"to_sparse_{layout}")(**blocks)}))
    assert (told["tensors"], told["nonfinite"]) == (1, {"a": 1})


@pytest.mark.parametrize("function", [eval, exec, subprocess.Popen, __import__, getattr, print])
def test_nothing_that_a_file_names_is_called(tmp_path: Path, function: Any) -> None:
    canary = tmp_path / "canary"
    path = saved(
        tmp_path / "f.pt", {"x": Evil(function, f"open({str(canary)!r}, 'w')"), "t": torch.zeros(2)}
    )
    assert found(path)["tensors"] == 1
    assert not canary.exists()


def test_a_module_that_torch_blocks_is_refused_and_no_damage(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="posix"):
        load_inert(torch, saved(tmp_path / "f.pt", Evil(os.system, "true")))


def test_endless_names_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_child, "_MOST_NAMES", 3)
    calls = [Evil(function, "1") for function in (eval, exec, getattr, print, len)]
    with pytest.raises(Refused, match="which is not data"):
        load_inert(torch, saved(tmp_path / "f.pt", calls))


def test_a_cycle_and_a_tree_that_doubles_are_walked_once(tmp_path: Path) -> None:
    tree: list[Any] = [torch.zeros(1)]
    for _ in range(100):
        tree = [tree, tree]
    assert found(saved(tmp_path / "f.pt", tree))["tensors"] == 1
    ring: list[Any] = [torch.zeros(1)]
    ring.append(ring)
    assert found(saved(tmp_path / "g.pt", ring))["tensors"] == 1


def test_what_is_cut_or_damaged_raises(tmp_path: Path) -> None:
    data = Path(saved(tmp_path / "f.pt", {"a": torch.zeros(1000)})).read_bytes()
    with pytest.raises(Exception, match=r"."):
        load_inert(torch, io.BytesIO(data[:-10]))


def test_a_pickle_that_is_none_of_torchs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(Refused, match="does not begin like a file of torch's"):
        load_inert(torch, str(tmp_path / "f.pkl"))


# --- safetensors

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


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_file(NAN))
    return path


def test_values_of_every_type_are_counted(file: Path) -> None:
    found = load_child.load(str(file), {"kind": "safetensors"}, safetensors, torch)
    assert found == {"tensors": 8, "read": SIZE, "nonfinite": COUNTS, "more": 0}


def test_so_many_names_are_told_and_the_rest_counted(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_child, "MOST", 2)
    found = load_child.load(str(file), {"kind": "safetensors"}, safetensors, torch)
    assert (len(found["nonfinite"]), found["more"]) == (2, len(COUNTS) - 2)


def test_the_child_imports_little_of_ckptsync() -> None:
    """What a hole in torch can reach is little."""
    program = (
        "import sys, ckptsync.verifier.load_child; print(*(m for m in sys.modules if"
        " m.startswith(('ckptsync', 'blake3', 'msgspec'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == {
        "ckptsync",
        "ckptsync.child",
        *(f"ckptsync.verifier{name}" for name in ("", ".load_child", ".sandbox")),
    }


def test_the_best_values_of_lightnings_callbacks_begin_as_infinities_and_are_no_finding() -> None:
    inf = np.array([np.inf, np.inf, np.inf, np.inf], np.float32).view(np.uint8)
    found = {
        "callbacks.ModelCheckpoint.kth_value": inf[:4],
        "callbacks.EMA.weights": inf,
        "state_dict.w": inf[:4],
    }
    told = count((name, "F32", piece) for name, piece in found.items())
    assert told["nonfinite"] == {"callbacks.EMA.weights": 4, "state_dict.w": 1}
    assert told["tensors"] == 3


# --- values that are not finite

TYPES = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E5M2": ml_dtypes.float8_e5m2,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
    "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
}


@pytest.mark.parametrize("dtype", TYPES)
def test_every_pattern_of_the_small_types_is_judged_as_the_library_judges_it(dtype: str) -> None:
    width = np.dtype(TYPES[dtype]).itemsize
    patterns = np.arange(256**width, dtype=np.uint8 if width == 1 else np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = ~np.isfinite(patterns.view(TYPES[dtype]).astype(np.float64))
    assert nonfinite(dtype, patterns.view(np.uint8)) == int(expected.sum()) > 0
    found = [
        nonfinite(dtype, p.view(np.uint8))
        for p in patterns[:: 97 if width == 2 else 1].reshape(-1, 1)
    ]
    assert found == expected[:: 97 if width == 2 else 1].tolist()


@pytest.mark.parametrize(
    ("dtype", "kind"), [("F32", np.float32), ("F64", np.float64), ("C64", np.complex64)]
)
def test_large_types_count_nan_and_both_infinities(dtype: str, kind: type) -> None:
    values: Any = np.array(
        [0.0, -0.0, 1e-45, np.nan, -np.nan, np.inf, -np.inf, np.finfo(np.float32).max], kind
    )
    assert nonfinite(dtype, values.view(np.uint8)) == 4


@pytest.mark.parametrize("dtype", ["I8", "U64", "BOOL", "F4"])
def test_types_without_such_values_have_none(dtype: str) -> None:
    assert nonfinite(dtype, np.full(64, 0xFF, np.uint8)) == 0


def test_a_value_in_the_last_of_several_chunks_is_found() -> None:
    values = np.frombuffer(bytearray(9 << 20), np.float32)
    values[-1] = np.nan
    assert nonfinite("F32", values.view(np.uint8)) == 1
