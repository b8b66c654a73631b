"""docs/places.md: the loop over ssh, on two machines that sshd stands in for."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from ckptsync.cli.main import parser
from tests.slurm import train
from tests.slurm.watched import NODES, Watched
from tests.support.exhaustive import in_exhaustive
from tests.support.run_documents import ROOT, Location, blocks, end, location
from tests.support.sshd import another_sshd
from tests.support.waiting import until

STEPS = 12
PATIENCE = 180.0  # seconds
PAGE = (ROOT / "docs" / "places.md").read_text()


class Loop(Watched):
    """The script of the document.  `ssh node0` and `ssh node1` lead to homes of their own."""

    def __init__(self, place: Location, stack: ExitStack) -> None:
        super().__init__(place)
        self.log = place.home / "loop.log"
        config = place.home / "ssh_config"
        config.write_text("".join(self._machine(n, stack) for n in range(NODES)))
        program = place.home / "bin" / "ssh"
        words = shlex.join([shutil.which("ssh") or "ssh", "-F", str(config)])
        program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        program.chmod(0o755)
        self._process: subprocess.Popen[str] | None = None
        stack.callback(self._close)

    def _machine(self, number: int, stack: ExitStack) -> str:
        """Start a machine's sshd; return the lines that lead there."""
        home = self.place.home / f"node{number}"
        home.mkdir()
        shutil.copy(ROOT / "tests" / "slurm" / "train.py", home)
        mine = {**self.environment, "HOME": str(home), "CKPTSYNC_NODE": home.name}
        names = ("HOME", "PATH", "PYTHONPATH", "TRAIN_UNTIL")
        told = [f'"{k}={v}"' for k, v in mine.items() if k in names or k.startswith("CKPTSYNC_")]
        server = stack.enter_context(another_sshd(f"SetEnv {' '.join(told)}\n"))
        return (
            f"Host {home.name}\n  HostName 127.0.0.1\n  Port {server.port}\n  User {server.user}\n"
            f"  IdentityFile {server.key}\n  IdentitiesOnly yes\n"
            f"  UserKnownHostsFile {server.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )

    def start(self) -> None:
        """Run the script that the document shows."""
        for block in blocks(PAGE):
            if block.mark == "file" and block.about == "start.sh":
                self.place.do(block)
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                ["sh", "start.sh"],
                cwd=self.place.home / "work",
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds.  Raises AssertionError, with the log, if it never does."""
        assert until(is_so, PATIENCE, 0.2), f"no {what}\n{self.log.read_text()[-6000:]}"

    def wait_for_end(self) -> None:
        """Wait until the script has ended, and with it both trainings."""
        process = self._process
        assert process is not None
        self.wait(lambda: process.poll() is not None, "end of the script")

    def terminate(self) -> None:
        """Send SIGTERM to the training of each machine."""
        for node in range(NODES):
            for line in self.logged(node)[-1:]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(line["pid"], signal.SIGTERM)

    def _close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.terminate()
            end(self._process)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    with location(tmp_path) as place, ExitStack() as stack:
        yield Loop(place, stack)


@in_exhaustive
def test_a_loop_over_ssh_goes_on_with_the_same_losses(loop: Loop) -> None:
    loop.start_head()
    loop.allow(5)
    loop.start()
    loop.wait(lambda: loop.has_reached(5), "step 5")
    loop.terminate()
    loop.wait_for_end()
    loop.wait(lambda: loop.is_verified(5), "verified checkpoint-5")
    loop.allow(STEPS)
    loop.start()
    loop.wait_for_end()
    for node in range(NODES):
        lines = loop.logged(node)
        assert [line["loss"] for line in lines] == train.losses(node, STEPS), loop.log.read_text()
        assert {line["start"] for line in lines} == {0, 5}


def test_the_task_for_skypilot_is_yaml_with_a_command_that_the_command_line_takes() -> None:
    (text,) = [block.text for block in blocks(PAGE) if block.about == "task.yaml"]
    task = yaml.safe_load(text)
    assert {"num_nodes", "resources", "setup", "run"} <= task.keys()
    words = shlex.split(task["run"].replace("\\\n", " ").splitlines()[1])
    args = parser(words[1]).parse_args(words[2:])
    assert (args.attempt, args.training[0]) == ("$attempt", "torchrun")
    known = ("TASK_ID", "NODE_IPS", "NUM_NODES", "NODE_RANK", "NUM_GPUS_PER_NODE")
    assert set(re.findall(r"\$SKYPILOT_(\w+)", task["run"])) == set(known)
