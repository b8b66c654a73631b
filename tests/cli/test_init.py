"""``ckptsync init`` asks on a terminal, and no answer breaks it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckptsync.cli.main import main
from tests.support.terminal import on_terminal, read_until


def test_answers_on_a_terminal_become_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "my out").mkdir()
    command = [sys.executable, "-m", "ckptsync", "init", "new.yaml"]
    with on_terminal(command, ("stdin", "stderr"), stdout=subprocess.PIPE, cwd=tmp_path) as (
        child,
        leader,
    ):
        os.write(leader, b"neither\nboth\n store \n'my out' runs/*\n")
        printed = child.communicate(timeout=300)[0].decode()
        said = os.read(leader, 1 << 16).decode()
    assert child.returncode == 0, said
    assert "role: 'neither' is none of worker, head, both" in said  # and it asks again
    assert "`ckptsync doctor -c new.yaml` has these options" in printed
    text = (tmp_path / "new.yaml").read_text()
    assert f"url: {tmp_path}/store\n" in text
    assert f'path: "{tmp_path}/my out"\n' in text
    assert f"path: {tmp_path}/runs/*\n" in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ("both\nstore\nit's\n", "no closing quotation"),
        ("both\nstore\n~no-such-user/out\n", "no such user's home directory"),
        ("head\n~no-such-user/store\n", "no such user's home directory"),
        ("both\nstore\nout \udce9\n", "/\\udce9: a path in a configuration must be UTF-8"),
        ("head\n   \n", "no answer"),
        ("", "--role: no answer"),
        ("neither\n", "--role: no answer"),
    ],
)
def test_an_answer_that_is_wrong_is_said_and_nothing_is_written(
    tmp_path: Path, answers: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Terminal(answers))
    monkeypatch.setattr(sys, "stderr", said := Terminal())
    assert main(["init", "new.yaml"]) == 2
    assert why in said.getvalue()
    assert not (tmp_path / "new.yaml").exists()


def test_after_an_interrupt_what_follows_is_on_a_line_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptsync", "init", "new.yaml"]
    with on_terminal(command, ("stdin", "stderr"), cwd=tmp_path) as (child, leader):
        read_until(leader, lambda shown: shown.endswith(b"[both]: "))
        child.send_signal(signal.SIGINT)
        read_until(leader, lambda shown: shown.startswith(b"\r\n"))
        assert child.wait(60) == 130
