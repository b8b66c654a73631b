"""One file is loaded, or said why not; a copy is made of what is elsewhere."""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.errors import Incomplete, Unsupported
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.loading import HINT, Kind, Limits, Loaded, descriptor, limits, load, loading
from ckptsync.verify.process import Loader
from tests.plain_files import safetensors_file

GOOD = safetensors_file({"a": ("F32", (4,), b"\0" * 16), "b": ("F32", (2,), b"\0\0\x80\x7f\0\0\xc0\x7f")})
MOST = Limits(memory=1 << 30, cpu=20, wall=20)


@pytest.fixture(scope="module")
def child() -> Iterator[Loader]:
    with loading() as made:
        yield made


def loaded(child: Loader, path: Path, data: bytes = GOOD, most: Limits = MOST, kind: Kind = "safetensors") -> Loaded:
    path.write_bytes(data)
    with path.open("rb") as file:
        return load(child, file.fileno(), kind, most)


def test_a_file_is_loaded_and_what_is_not_finite_counted(child: Loader, tmp_path: Path) -> None:
    found = loaded(child, tmp_path / "f")
    assert (found.tensors, found.read, found.nonfinite, found.fault) == (2, 24, (("b", 2),), "")
    assert found.loader.startswith("safetensors ")


def test_what_cannot_be_loaded_says_why_and_the_next_one_is_loaded(child: Loader, tmp_path: Path) -> None:
    assert "header" in loaded(child, tmp_path / "f", GOOD[:-1]).fault.lower()
    assert loaded(child, tmp_path / "f", b"").fault
    assert loaded(child, tmp_path / "f").tensors == 2


def test_a_child_without_memory_is_a_fault(tmp_path: Path) -> None:
    big = safetensors_file({"a": ("U8", (64 << 20,), bytes(64 << 20))})
    starved = Limits(memory=-(140 << 20), cpu=20, wall=20)
    with loading() as child:
        assert loaded(child, tmp_path / "f", big, starved).fault


def test_what_is_no_file_of_torchs_is_refused_and_no_damage(child: Loader, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = loaded(child, tmp_path / "f", b"hello", kind="torch")
    assert (found.fault, bool(found.refused)) == ("", True)


def test_nothing_is_imported_from_where_the_caller_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "safetensors", "numpy", "json", "ckptsync"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    with loading() as child:
        assert loaded(child, tmp_path / "f").tensors == 2
    assert not (tmp_path / "canary").exists()


def test_limits_grow_with_the_file() -> None:
    assert limits(100 << 30).wall > limits(0).wall >= 60
    assert limits(100 << 30).cpu > limits(0).cpu


def test_a_file_elsewhere_is_copied_and_a_near_one_is_not(tmp_path: Path) -> None:
    store = MemoryStore()
    store.write("f", [GOOD])
    (tmp_path / "f").write_bytes(GOOD)
    for source in (store, LocalFiles(str(tmp_path))):
        with descriptor(source, "f", len(GOOD)) as fd:
            assert Path(f"/dev/fd/{fd}").read_bytes() == GOOD


@pytest.mark.parametrize("kind", ["near", "far"])
def test_what_has_gone_is_incomplete(kind: str, tmp_path: Path) -> None:
    source = LocalFiles(str(tmp_path)) if kind == "near" else MemoryStore()
    with pytest.raises(Incomplete, match="not there"), descriptor(source, "gone", 1):
        pass


def without(path: Path, *missing: str) -> Loader:
    """A child whose interpreter lacks some packages."""
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in missing)
    path.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; {hide}; from ckptsync.verify.child import main; sys.exit(main())"\n'
    )
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Loader("ckptsync.verify.child", HINT, python=str(path))


def test_without_torch_numpys_loader_is_used_and_said(tmp_path: Path) -> None:
    with without(tmp_path / "python", "torch") as child:
        found = loaded(child, tmp_path / "f")
        assert (found.tensors, found.nonfinite, found.fault) == (2, (("b", 2),), "")
        assert "numpy" in found.loader
        assert "torch is not installed" in loaded(child, tmp_path / "f", b"PK", kind="torch").refused


def test_without_safetensors_nothing_is_loaded_silently(tmp_path: Path) -> None:
    with without(tmp_path / "python", "torch", "safetensors") as child, pytest.raises(Unsupported, match="neither"):
        loaded(child, tmp_path / "f")
