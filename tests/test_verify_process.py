"""A child that is killed, hangs, or cannot start is told apart, and none of it goes unsaid."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ckptsync.errors import CkptsyncError, Unsupported
from ckptsync.verify import process
from ckptsync.verify.process import Child, Died

REQUEST = {"wall": 20, "cpu": 20}
READ = "head -n 1 <&0 >/dev/null;"


def child(path: Path, program: str, told: list[int] | None = None) -> Child:
    """An interpreter that does something else; its standard input is the socket, which it answers, too."""
    file = path / "python"
    file.write_text(f"#!/bin/sh\n{program}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return Child("a.module", "install it", (lambda n: None) if told is None else told.append, str(file))


def test_a_request_has_its_answer_and_the_child_stays(tmp_path: Path) -> None:
    with child(tmp_path, "echo ready x >&0; while read -r line; do echo '{\"n\": 1}' >&0; done") as asked:
        assert [asked.ask(REQUEST) for _ in range(2)] == [{"n": 1}] * 2
        assert asked.loader == "x"


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("kill -SEGV $$", "killed by SIGSEGV"),
        ("kill -XCPU $$", "20 s of CPU time"),
        ("kill -ALRM $$", "not done in 20 s"),
        ("echo odd >&2; exit 1", "status 1: odd"),
        ("exit 0", "status 0"),
    ],
)
def test_a_death_is_told_by_its_cause_and_another_child_is_started(tmp_path: Path, program: str, fault: str) -> None:
    with child(tmp_path, f"echo ready x >&0; {READ} {program}") as asked:
        for _ in range(2):
            with pytest.raises(Died, match=fault):
                asked.ask(REQUEST)


def test_a_child_that_somebody_else_kills_is_no_damage_and_another_is_started(tmp_path: Path) -> None:
    with child(tmp_path, f"echo ready x >&0; {READ} kill -KILL $$") as asked:
        for _ in range(2):
            with pytest.raises(CkptsyncError, match="killed by SIGKILL") as raised:
                asked.ask(REQUEST)
            assert "memory" in raised.value.hint


def test_a_child_that_hangs_is_ended_and_shows_life_until_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_GRACE", 0)
    monkeypatch.setattr(process, "_SLICE", 0.01)
    told: list[int] = []
    with child(tmp_path, "echo ready x >&0; exec sleep 100", told) as asked, pytest.raises(Died, match="not done in 1 s"):
        asked.ask({"wall": 1, "cpu": 1})
    assert len(told) > 2
    assert set(told) == {0}


def test_what_never_got_ready_is_no_damage(tmp_path: Path) -> None:
    with (
        child(tmp_path, "echo no torch library >&2; exit 1") as asked,
        pytest.raises(CkptsyncError, match="no torch library") as raised,
    ):
        asked.ask(REQUEST)
    assert raised.value.exit_code == 1


def test_without_its_libraries_it_is_unsupported_and_says_what_to_install(tmp_path: Path) -> None:
    with child(tmp_path, "echo nothing here >&2; exit 3") as asked, pytest.raises(Unsupported, match="nothing here") as raised:
        asked.ask(REQUEST)
    assert raised.value.hint == "install it"


def test_a_large_request_and_a_large_answer_pass(tmp_path: Path) -> None:
    long = "x" * 300_000
    program = (
        """exec 3>&0; echo ready x >&3; read -r line; { printf '{"n": "'; head -c 300000 /dev/zero | tr '\\0' x; echo '"}'; } >&3"""
    )
    with child(tmp_path, program) as asked:
        assert asked.ask(REQUEST | {"more": long}) == {"n": long}


def test_nonsense_is_no_answer(tmp_path: Path) -> None:
    with child(tmp_path, "echo ready x >&0; read -r line; echo hello >&0") as asked, pytest.raises(Died, match="hello"):
        asked.ask(REQUEST)
