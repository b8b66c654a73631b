"""A child that is killed, hangs, runs out of memory or cannot start is told apart, and none of it goes unsaid."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, Incomplete, Unsupported
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.loading import Limits, Loaded, descriptor, limits, load
from tests.plain_files import safetensors_file

GOOD = safetensors_file({"a": ("F32", (4,), b"\0" * 16), "b": ("F32", (2,), b"\0\0\x80\x7f\0\0\xc0\x7f")})
MOST = Limits(memory=1 << 30, cpu=20, wall=20)


def loaded(path: Path, data: bytes = GOOD, most: Limits = MOST, python: str = sys.executable) -> Loaded:
    path.write_bytes(data)
    with path.open("rb") as file:
        return load(file.fileno(), most, python)


def python(path: Path, program: str) -> str:
    """An interpreter that does something else with the child's arguments."""
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_file_is_loaded_and_what_is_not_finite_counted(tmp_path: Path) -> None:
    found = loaded(tmp_path / "f")
    assert (found.tensors, found.read, found.nonfinite, found.fault) == (2, 24, (("b", 2),), "")
    assert found.loader.startswith("safetensors ")


def test_what_cannot_be_loaded_says_why(tmp_path: Path) -> None:
    assert "header" in loaded(tmp_path / "f", GOOD[:-1]).fault.lower()
    assert loaded(tmp_path / "f", b"").fault


def test_a_child_without_memory_is_a_fault(tmp_path: Path) -> None:
    big = safetensors_file({"a": ("U8", (64 << 20,), bytes(64 << 20))})
    starved = Limits(memory=-(140 << 20), cpu=20, wall=20)
    assert loaded(tmp_path / "f", big, starved).fault


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("echo ready x; kill -KILL $$", "killed by SIGKILL"),
        ("echo ready x; kill -SEGV $$", "killed by SIGSEGV"),
        ("echo ready x; kill -XCPU $$", "CPU time"),
        ("echo ready x; kill -ALRM $$", "not loaded in 20 s"),
        ("echo ready x; echo odd >&2; exit 1", "status 1: odd"),
        ("echo ready x", "status 0"),
    ],
)
def test_a_death_is_told_by_its_cause(tmp_path: Path, program: str, fault: str) -> None:
    assert fault in loaded(tmp_path / "f", python=python(tmp_path / "python", program)).fault


def test_a_child_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptsync.verify.loading._STARTING", 0)
    hanging = python(tmp_path / "python", "echo ready x; exec sleep 100")
    found = loaded(tmp_path / "f", most=Limits(memory=0, cpu=1, wall=1), python=hanging)
    assert found.fault == "not loaded in 1 s"


def test_what_never_got_ready_is_no_damage(tmp_path: Path) -> None:
    with pytest.raises(CkptsyncError, match="no torch library") as raised:
        loaded(tmp_path / "f", python=python(tmp_path / "python", "echo no torch library >&2; exit 1"))
    assert raised.value.exit_code == 1


def test_without_a_loader_it_is_unsupported_and_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as raised:
        loaded(tmp_path / "f", python=python(tmp_path / "python", "exit 3"))
    assert "ckptsync[load]" in raised.value.hint


def test_nothing_is_imported_from_where_the_caller_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "safetensors", "numpy", "json", "ckptsync"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    assert loaded(tmp_path / "f").fault == ""
    assert not (tmp_path / "canary").exists()


def test_a_larger_file_may_take_longer() -> None:
    assert limits(1 << 40).cpu > limits(1 << 20).cpu >= 60
    assert limits(1 << 40).wall > limits(1 << 20).wall >= 300


def test_a_local_file_is_opened_where_it_lies_and_another_is_copied(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(GOOD)
    store = MemoryStore()
    store.write("f", [GOOD])
    for source in (LocalFiles(str(tmp_path)), store):
        with descriptor(source, "f", len(GOOD)) as fd:
            assert load(fd, MOST).tensors == 2


def test_a_file_that_went_away_is_incomplete(tmp_path: Path) -> None:
    for source in (LocalFiles(str(tmp_path)), MemoryStore()):
        with pytest.raises(Incomplete), descriptor(source, "f", 1):
            pass


def without(path: Path, *missing: str) -> str:
    """An interpreter in which some packages are not installed."""
    hide = "; ".join(f"sys.modules[{name!r}] = None" for name in missing)
    program = f"import sys; {hide}; from ckptsync.verify.child import main; sys.exit(main(*sys.argv[1:]))"
    return python(path, f'shift 2; exec {sys.executable} -c "{program}" "$@"')


def test_without_torch_numpys_loader_is_used_and_said(tmp_path: Path) -> None:
    found = loaded(tmp_path / "f", python=without(tmp_path / "python", "torch"))
    assert (found.tensors, found.nonfinite, found.fault) == (2, (("b", 2),), "")
    assert "numpy" in found.loader


def test_without_safetensors_nothing_is_loaded_silently(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="neither"):
        loaded(tmp_path / "f", python=without(tmp_path / "python", "torch", "safetensors"))
