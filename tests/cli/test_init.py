"""``ckptsync init`` asks on a terminal, and no answer breaks it."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.terminal import on_terminal, read_until


def answered(folder: Path, answers: bytes) -> tuple[int, str]:
    """Return the exit code of an ``init`` whose questions a terminal answers, and its output."""
    terminal, inner = pty.openpty()
    with contextlib.ExitStack() as closing:
        closing.callback(os.close, terminal)
        os.write(terminal, answers)
        done = closing.enter_context(
            subprocess.Popen(
                [sys.executable, "-m", "ckptsync", "init", "new.yaml"],
                cwd=folder,
                stdin=inner,
                stdout=subprocess.PIPE,
                stderr=inner,
            )
        )
        closing.callback(done.kill)
        os.close(inner)
        said, _ = done.communicate(timeout=300)
        with contextlib.suppress(OSError):  # the end of what a terminal has
            while part := os.read(terminal, 1 << 16):
                said += part
    return done.returncode, said.decode()


def test_answers_on_a_terminal_become_a_configuration(tmp_path: Path) -> None:
    (tmp_path / "my out").mkdir()
    code, said = answered(tmp_path, b"neither\nboth\n store \n'my out' runs/*\n")
    assert code == 0, said
    assert "role: 'neither' is none of worker, head, both" in said  # and it asks again
    assert "`ckptsync doctor -c new.yaml` has these options" in said
    text = (tmp_path / "new.yaml").read_text()
    assert f"url: {tmp_path}/store\n" in text
    assert f'path: "{tmp_path}/my out"\n' in text
    assert f"path: {tmp_path}/runs/*\n" in text


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        (b"both\nstore\nit's\n", "no closing quotation"),
        (b"both\nstore\n~no-such-user/out\n", "no such user's home directory"),
        (b"head\n~no-such-user/store\n", "no such user's home directory"),
        (b"head\n   \n", "no answer"),
        (b"\x04", "--role: no answer"),
        (b"neither\n\x04", "--role: no answer"),
    ],
)
def test_an_answer_that_is_wrong_is_said_and_nothing_is_written(
    tmp_path: Path, answers: bytes, why: str
) -> None:
    code, said = answered(tmp_path, answers)
    assert code == 2, said
    assert why in said
    assert "Traceback" not in said
    assert not (tmp_path / "new.yaml").exists()


def test_after_an_interrupt_what_follows_is_on_a_line_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckptsync", "init", "new.yaml"]
    with on_terminal(command, ("stdin", "stderr"), cwd=tmp_path) as (child, leader):
        read_until(leader, lambda shown: shown.endswith(b"[both]: "))
        child.send_signal(signal.SIGINT)
        read_until(leader, lambda shown: shown.startswith(b"\r\n"))
        assert child.wait(60) == 130
