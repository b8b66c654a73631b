"""A child process of the head, as the head starts it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from ckptsync.config.loading import read
from ckptsync.daemon.orders import Brief, Done, Failed, Order, encode, message
from ckptsync.stores.opening import create_store
from tests.cli_store import make
from tests.test_daemon_heading import arrive

COMMAND = [sys.executable, "-m", "ckptsync.daemon.child"]


def answered(url: Path, order: Order, more: str = "", parent: int = 0) -> tuple[int, list[object], str]:
    """Exit status, what it said, what went to the log."""
    config = read(f"roles: [head]\nstore: {{url: {url}}}\n{more}", "c", {})
    brief = encode(Brief(order, config, parent or os.getpid()))
    done = subprocess.run(COMMAND, input=brief, capture_output=True, check=False, timeout=120)
    return done.returncode, [message(line) for line in done.stdout.splitlines()], done.stderr.decode()


def test_an_order_is_carried_out_and_answered(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    arrive(store, "fsdp2")
    for kind, text in (("consolidate", "phase=consolidated run=fsdp2"), ("verify", "phase=proved run=fsdp2")):
        code, said, _ = answered(tmp_path, Order(kind, "fsdp2", "checkpoint-4"))  # type: ignore[arg-type]
        assert isinstance(said[-1], Done)
        assert (code, text in said[-1].lines[0].text, said[-1].changed) == (0, True, True)


def test_an_operators_error_keeps_its_hint_and_one_of_a_store_that_has_gone_passes(tmp_path: Path) -> None:
    _, [absent], _ = answered(tmp_path / "nothing", Order("consolidate", "fsdp2", "checkpoint-4"))
    assert isinstance(absent, Failed)
    assert (absent.exit_code, absent.passes, absent.is_ours, bool(absent.hint)) == (4, True, False, True)


def test_damage_is_an_answer_with_what_was_found(tmp_path: Path) -> None:
    make(tmp_path)
    model = next(tmp_path.glob("fsdp2/consolidated/*/model.safetensors"))
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.chmod(0o600)
    model.write_bytes(data)
    _, said, _ = answered(tmp_path, Order("verify", "fsdp2", "checkpoint-4", level="digest"))
    assert isinstance(said[-1], Done)
    assert said[-1].errors == ("fsdp2/checkpoint-4: damaged",)
    assert any(line.is_error and "phase=found" in line.text for line in said[-1].lines)


def test_a_child_of_a_dead_parent_ends_before_it_begins(tmp_path: Path) -> None:
    assert answered(tmp_path, Order("consolidate", "a", "b"), parent=1)[:2] == (1, [])
    assert subprocess.run(COMMAND, input=b"", capture_output=True, check=False).returncode != 0


def test_sigterm_ends_it_while_it_waits_for_a_store_that_does_not_answer(tmp_path: Path) -> None:
    config = read("roles: [head]\nstore: {url: sftp://203.0.113.1/x}\nlimits: {patience: 10m}\n", "c", {})
    with subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdin
        assert child.stderr
        assert child.stdout
        child.stdin.write(encode(Brief(Order("consolidate", "a", "b"), config, os.getpid())))
        child.stdin.close()
        while "SigCgt" not in (status := Path(f"/proc/{child.pid}/status").read_text()) or not catches_term(status):
            assert child.poll() is None
        child.send_signal(signal.SIGTERM)
        said = [message(line) for line in child.stdout.read().splitlines()]
        assert child.wait(30) in (0, 143)
    assert all(isinstance(s, Failed) and s.text == "the service is stopping" for s in said)


def catches_term(status: str) -> bool:
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & (1 << (signal.SIGTERM - 1)))
