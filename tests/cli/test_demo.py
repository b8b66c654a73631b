"""``ckptsync demo`` for real, and its pieces: it believes nothing that it has not seen in the
store.
"""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.cli import demo
from ckptsync.errors import CkptsyncError
from tests.support.command_line import Cli


def children_of(directory: Path) -> list[Path]:
    """Return processes that work in a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (
                int(process.name) != os.getpid()
                and str(directory).encode() in (process / "cmdline").read_bytes()
            ):
                found.append(process)
        except OSError:  # noqa: PERF203 - it has ended
            continue
    return found


def test_damage_is_repaired_and_the_commands_to_try_next_work(tmp_path: Path, cli: Cli) -> None:
    printed = cli("demo", "--dir", tmp_path / "a [b] c").out
    states = [line.split()[2] for line in printed.splitlines() if line.startswith("  fsdp2 ")]
    assert (
        states.index("VERIFIED")
        < states.index("DAMAGED")
        < len(states) - 1 - states[::-1].index("VERIFIED")
    )
    assert "the verifier names checkpoint-4/pytorch_model_fsdp_0/" in printed
    prefix = demo.program()
    commands = [shlex.split(line) for line in printed.partition("try next:\n")[2].splitlines()]
    assert [words[len(prefix)] for words in commands] == ["inspect", "verify", "merge"]
    for words in commands:
        assert words[: len(prefix)] == prefix
        cli(*words[len(prefix) :])
    assert not children_of(tmp_path)


def test_a_program_outside_of_path_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    words = demo.program()
    assert Path(words[0]).is_absolute()
    (tmp_path / "ckptsync").write_text("#!/bin/sh\n")
    (tmp_path / "ckptsync").chmod(0o755)
    assert demo.program() == ["ckptsync"]


def test_a_step_that_is_not_seen_in_time_is_a_failure_and_the_children_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(demo, "PATIENCE", -1.0)
    error, hint = cli("demo", "--dir", tmp_path / "d", code=1).err.splitlines()
    assert error.startswith("ckptsync: error: demo: nodes and head alive: not seen within")
    assert str(tmp_path / "d" / "etc" / "head.log") in hint
    assert not children_of(tmp_path)


def test_a_demo_that_is_terminated_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptsync", "demo", "--json", "--dir", str(tmp_path / "d")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert "say" in json.loads(child.stdout.readline())
        child.terminate()
        assert child.wait(60) == 143
    assert not children_of(tmp_path)


def test_a_child_that_ends_is_an_error_with_its_log(tmp_path: Path) -> None:
    with demo.running(tmp_path, {"head": {"nonsense": 1}}) as children:
        children[0].process.wait(60)
        with pytest.raises(CkptsyncError, match="head ended with exit code 2") as caught:
            demo.check_running(children)
    assert str(tmp_path / "head.log") in caught.value.hint
    assert "nonsense: unknown key" in (tmp_path / "head.log").read_text()


def test_a_directory_that_is_in_use_is_refused(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "file").write_text("")
    cli("demo", "--dir", tmp_path, code=2)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
