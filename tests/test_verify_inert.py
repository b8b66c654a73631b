"""torch's files are loaded with ``weights_only`` and no fallback; what is no tensor becomes an object that can do nothing."""

from __future__ import annotations

import collections
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptsync.verify import inert
from ckptsync.verify.child import counted

torch = pytest.importorskip("torch")


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
    return counted(inert.storages(inert.load(torch, file), torch))


@pytest.mark.parametrize("legacy", [False, True])
def test_tensors_are_counted_once_a_storage_wherever_they_are(tmp_path: Path, legacy: bool) -> None:  # noqa: FBT001
    a = torch.tensor([1.0, float("nan"), float("inf")])
    value = {
        "model": {"a": a, "tied": a[1:]},
        "rest": [torch.zeros(2, dtype=torch.int64), (torch.tensor(float("nan"), dtype=torch.bfloat16),)],
    }
    told = found(saved(tmp_path / "f.pt", value, _use_new_zipfile_serialization=not legacy))
    assert told == {"tensors": 3, "read": 12 + 16 + 2, "nonfinite": {"model.a": 2, "rest.1.0": 1}, "more": 0}


def test_sparse_and_foreign_objects_are_looked_into(tmp_path: Path) -> None:
    space = collections.namedtuple("space", "a")  # noqa: PYI024 - a class that only this module has
    globals()["space"], space.__module__, space.__qualname__ = space, __name__, "space"
    sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, float("inf")], (3,), check_invariants=True)
    told = found(saved(tmp_path / "f.pt", [sparse, space(torch.tensor([float("nan")])), np.arange(3)]))
    assert told["nonfinite"] == {"0": 1, "1.0": 1}


@pytest.mark.filterwarnings("ignore:Sparse C")
@pytest.mark.parametrize("layout", ["csr", "csc", "bsr", "bsc"])
def test_compressed_sparse_tensors_are_looked_into(tmp_path: Path, layout: str) -> None:
    blocks = {"blocksize": (2, 2)} if layout.startswith("b") else {}
    dense = torch.tensor([[1.0, float("nan")], [0.0, 2.0]])
    told = found(saved(tmp_path / "f.pt", {"a": getattr(dense, f"to_sparse_{layout}")(**blocks)}))
    assert (told["tensors"], told["nonfinite"]) == (3, {"a": 1})


@pytest.mark.parametrize("function", [eval, exec, subprocess.Popen, __import__, getattr, print])
def test_nothing_that_a_file_names_is_called(tmp_path: Path, function: Any) -> None:
    canary = tmp_path / "canary"
    path = saved(tmp_path / "f.pt", {"x": Evil(function, f"open({str(canary)!r}, 'w')"), "t": torch.zeros(2)})
    assert found(path)["tensors"] == 1
    assert not canary.exists()


def test_a_module_that_torch_blocks_is_refused_and_no_damage(tmp_path: Path) -> None:
    with pytest.raises(inert.Refused, match="posix"):
        inert.load(torch, saved(tmp_path / "f.pt", Evil(os.system, "true")))


def test_endless_names_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inert, "_MOST_NAMES", 3)
    calls = [Evil(function, "1") for function in (eval, exec, getattr, print, len)]
    with pytest.raises(inert.Refused, match="more than data"):
        inert.load(torch, saved(tmp_path / "f.pt", calls))


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
        inert.load(torch, io.BytesIO(data[:-10]))


def test_a_pickle_that_is_none_of_torchs_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.pkl").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(inert.Refused, match="begins as no file of torch's"):
        inert.load(torch, str(tmp_path / "f.pkl"))


def test_torch_is_not_imported_with_the_module() -> None:
    program = "import sys, ckptsync.verify.inert; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
