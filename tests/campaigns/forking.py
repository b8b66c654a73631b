"""A process that has imported what trainers need, and forks one whenever it is told to: a training
begins within a second or two.

    python -m tests.campaigns.forking MODULE ...

Each line of its input is JSON: ``script``, ``words``, ``env``, ``cwd`` and ``log`` of a process to
be; it answers with the process's id.  What it has forked dies with it, and it dies with whoever
started it.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.seaweedfs import die_with_parent


class Forker:
    """``command`` runs this module, wherever its children are to live."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(env),
                text=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509
            )
        self._log = log

    def ready(self) -> None:
        """Until all is imported."""
        self._answer()

    def fork(
        self, script: Path, words: Sequence[str], env: Mapping[str, str], cwd: Path, log: Path
    ) -> int:
        """A process that runs a script; its id."""
        assert self._process.stdin
        told = {
            "script": str(script),
            "words": list(words),
            "env": dict(env),
            "cwd": str(cwd),
            "log": str(log),
        }
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def close(self) -> None:
        """With it go those that it has forked."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, f"nothing forks here any more: {self._log}"
        return line.strip()


def main() -> None:
    """The process that forks; a child leaves this function as what it is to be."""
    for module in sys.argv[1:]:
        importlib.import_module(module)
    # nobody waits for them: they are gone when they have ended
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(json.loads(line))
            return
        print(pid, flush=True)


def _become(told: dict[str, Any]) -> None:
    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    log = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(told["env"])
    os.chdir(told["cwd"])
    sys.argv = [told["script"], *told["words"]]
    runpy.run_path(told["script"], run_name="__main__")


if __name__ == "__main__":
    main()
