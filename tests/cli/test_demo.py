"""``ckptsync demo`` for real."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckptsync.cli import demo
from ckptsync.cli.main import main


def test_the_whole_story_is_told_and_seen(tmp_path: Path) -> None:
    begun = time.monotonic()
    command = [sys.executable, "-m", "ckptsync", "demo", "--json", "--dir", str(tmp_path / "d")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (ran.returncode, ran.stderr) == (0, f"ckptsync: {tmp_path}/d/store: a new store was made here\n")
    events = [json.loads(line) for line in ran.stdout.splitlines()]
    words = [row["state"] for event in events for row in event.get("table", []) if row["run"] == "fsdp2"]
    assert words.index("VERIFIED") < words.index("DAMAGED") < len(words) - 1 - words[::-1].index("VERIFIED")
    assert any("the verifier names checkpoint-4/pytorch_model_fsdp_0/" in event.get("say", "") for event in events)
    assert events[-1]["ok"] is True
    assert all(
        Path(model, "config.json").exists() and Path(model, "model.safetensors").exists() for model in events[-1]["models"].values()
    )
    assert time.monotonic() - begun < 60


def test_the_three_commands_to_try_next_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--dir", str(tmp_path / "a [b] c")]) == 0
    said = capsys.readouterr().out
    after = said[said.index("try next:\n") :].splitlines()[1:]
    prefix = demo.program()
    commands = [shlex.split(line) for line in after]
    assert [words[: len(prefix) + 1] for words in commands] == [[*prefix, word] for word in ("inspect", "verify", "merge")]
    for words in commands:
        assert main(words[len(prefix) :]) == 0


def test_a_program_that_no_path_leads_to_is_named_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = demo.program()
    assert Path(said[0]).is_absolute()
    assert subprocess.run([*said, "--version"], check=True, capture_output=True).stdout.startswith(b"ckptsync ")
    (tmp_path / "ckptsync").write_text("#!/bin/sh\n")
    (tmp_path / "ckptsync").chmod(0o755)
    assert demo.program() == ["ckptsync"]


def test_what_is_not_seen_in_time_is_a_failure_and_the_children_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "PATIENCE", -1.0)
    assert main(["demo", "--dir", str(tmp_path / "d")]) == 1
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("ckptsync: error: demo: nodes and head alive: not seen within")
    assert str(tmp_path / "d" / "etc" / "head.log") in hint
    assert not [p for p in Path("/proc").glob("[0-9]*") if is_child(p, str(tmp_path))]


def is_child(process: Path, directory: str) -> bool:
    try:
        return int(process.name) != os.getpid() and directory.encode() in (process / "cmdline").read_bytes()
    except OSError:
        return False


def test_a_directory_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert main(["demo", "--dir", str(tmp_path)]) == 2
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_demo_that_is_terminated_leaves_no_process_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptsync", "demo", "--json", "--dir", str(tmp_path / "d")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        while '"table"' not in child.stdout.readline():
            assert child.poll() is None
        child.terminate()
        assert child.wait(20) == 143
    assert not [p for p in Path("/proc").glob("[0-9]*") if is_child(p, str(tmp_path))]
