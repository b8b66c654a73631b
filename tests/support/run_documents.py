"""Documents that are run: their fenced blocks, what an HTML comment before each says of it, and a
location to run them in.

    <!-- run -->                    a shell's commands; they must end with 0.  `pip` does nothing:
                                    what it installs is there
    <!-- run: torch accelerate -->  the same, where the trainers' Python has these modules
    <!-- run: on shards -->         the same, beside the demo's two nodes
    <!-- until: VERIFIED step-4 --> commands that are repeated until a line of their output has
        these words; "; " and those
    <!-- serve -->                  a command that goes on to the end of the document
    <!-- output -->                 lines that the last commands have printed ("…" stands for
                                    anything, and columns may be wider)
    <!-- file: train.py -->         a file of that name
    <!-- fragment -->               a part of a script;  <!-- picture -->: no commands at all
    <!-- not run: why -->           nothing is done with it here, but to look at its commands

`/mnt/checkpoints`, `/data`, `/models` and `/etc/ckptsync` are directories of the location.  The
trainers' Python is this one, or $CKPTSYNC_TEST_TRAINERS: one that has DeepSpeed or Lightning, too.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import ckptsync

ROOT = Path(__file__).parent.parent.parent
TUTORIAL = ROOT / "docs" / "tutorial.md"
TUTORIAL_ZH = ROOT / "docs" / "tutorial.zh.md"
GUIDES = sorted((ROOT / "docs" / "guides").glob("*.md"))
READMES = [ROOT / "README.md", ROOT / "README.zh.md"]
TRAINERS = os.environ.get("CKPTSYNC_TEST_TRAINERS", sys.executable)
PATIENCE = 240.0  # seconds for a command, and for a text to appear
LOCATIONS = ("/mnt/checkpoints", "/etc/ckptsync", "/models", "/data")
QUICK = {  # the same services with shorter breaths
    "CKPTSYNC_WORKER_QUIET": "500ms",
    "CKPTSYNC_WORKER_UNMARKED": "1s",
    "CKPTSYNC_WORKER_SCAN_EVERY": "500ms",
    "CKPTSYNC_HEAD_EVERY": "500ms",
    "CKPTSYNC_VERIFY_TICK": "500ms",
}
TRAINING = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "DS_ACCELERATOR": "cpu",
    "PYTHONWARNINGS": "ignore",
    "RAY_ADDRESS": "local",  # a cluster of its own, whatever runs on this machine
    "RAY_USAGE_STATS_ENABLED": "0",
}
PROGRAMS = {
    "ckptsync": f'exec "{sys.executable}" -m ckptsync "$@"',
    "pip": "exit 0",
    "python": f'exec "{TRAINERS}" "$@"',
    "torchrun": f'exec "{TRAINERS}" -m torch.distributed.run "$@"',
    "accelerate": f'exec "{TRAINERS}" -m accelerate.commands.accelerate_cli "$@"',
    "deepspeed": f'exec "{TRAINERS}" -m deepspeed.launcher.runner "$@"',
}
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\n+)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.  ``mark``: the word before the colon, ``about``: what follows it."""

    line: int
    language: str
    text: str
    mark: str
    about: str


def blocks(text: str) -> list[Block]:
    """Return every fenced block of a document, in order."""
    result = []
    for match in _BLOCK.finditer(text):
        mark, _, about = (match["mark"] or "").partition(":")
        line = text[: match.start("text")].count("\n")
        result.append(Block(line, match["language"], match["text"], mark.strip(), about.strip()))
    return result


def commands(text: str) -> list[str]:
    """Return the `ckptsync` command lines in a document: of blocks of commands, and in its text."""
    lines = [
        line
        for b in blocks(text)
        if (not b.language and b.mark not in ("output", "picture")) or b.language in ("sh", "bash")
        for line in b.text.splitlines()
    ]
    lines += re.findall(
        r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    )
    matches = (
        re.fullmatch(r"\s*(?:\$ |sudo )?(?:/opt/ckptsync/bin/)?(ckptsync [a-z-].*)", line)
        for line in lines
    )
    return [match[1] for match in matches if match]


def has(modules: str) -> str:
    """Return the first of these modules that the trainers' Python lacks; "" if it has all."""
    script = (
        "import importlib.util, sys; print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m)"
        " is None][:1])"
    )
    command = [TRAINERS, "-c", script, *modules.split()]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@dataclass(slots=True)
class Location:
    """Where a document is run."""

    home: Path
    printed: str = ""
    _served: list[subprocess.Popen[str]] = field(default_factory=list)

    def lay_shards(self) -> None:
        """Copy a checkpoint of two nodes, its parts also in one directory, and its base model."""
        demo = Path(ckptsync.__file__).parent / "demo_data"
        for node in ("node0", "node1"):
            for folder in (node, "out"):
                shards = self.home / "work" / folder / "checkpoint-500"
                shutil.copytree(demo / "fsdp2" / node / "checkpoint-4", shards, dirs_exist_ok=True)
        shutil.copytree(demo / "base", self.home / "models" / "base")

    def do(self, block: Block) -> None:
        """Run a block, or write its file; raise AssertionError where the document is wrong."""
        if block.mark == "file":
            path = self.home / "work" / self.here(block.about)  # which may be absolute
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.here(block.text))
        elif block.mark == "serve":
            self._serve(block)
        elif block.mark == "run":
            self.printed = self._run(block, check=True)
        elif block.mark == "until":
            self._until(block)
        elif block.mark == "output":
            for line in block.text.splitlines():
                assert self._is_printed(line), (
                    f"line {block.line}: {line!r} is not in\n{self.printed}"
                )

    def here(self, text: str) -> str:
        """Return the text with the directories of this location."""
        for location in LOCATIONS:
            pattern = rf"(?<![\w./]){re.escape(location)}(?![\w])"
            text = re.sub(pattern, str(self.home) + location, text)
        return text

    def _run(self, block: Block, *, check: bool) -> str:
        started = self._start(self.here(block.text), subprocess.PIPE)
        try:
            printed, _ = started.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired as e:
            end(started)
            raise AssertionError(
                f"line {block.line}: not done after {PATIENCE:g} s\n{(e.stdout or b'')[-3000:]!r}"
            ) from e
        assert not check or started.returncode == 0, (
            f"line {block.line}: exit code {started.returncode}\n{printed[-5000:]}"
        )
        return printed

    def _start(self, text: str, out: int | IO[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=self.home / "work",
            env=self.environment(),
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def _until(self, block: Block) -> None:
        end = time.monotonic() + PATIENCE
        self.printed = ""
        while not all(self._has_line(words.split()) for words in block.about.split(";")):
            self._check_served()
            assert time.monotonic() < end, (
                f"line {block.line}: no {block.about!r} in\n{self.printed}\n{self._logs()}"
            )
            time.sleep(1)
            self.printed = self._run(block, check=False)

    def _serve(self, block: Block) -> None:
        with (self.home / f"served-{len(self._served)}.log").open("w") as log:
            self._served.append(self._start(f"exec {self.here(block.text).strip()}", log))

    def _check_served(self) -> None:
        for process in self._served:
            assert process.poll() is None, f"ended with {process.returncode}\n{self._logs()}"

    def _logs(self) -> str:
        logs = sorted(self.home.glob("served-*.log"))
        return "\n".join(path.read_text()[-3000:] for path in logs)

    def _has_line(self, words: list[str]) -> bool:
        return any(all(word in line for word in words) for line in self.printed.splitlines())

    def _is_printed(self, line: str) -> bool:
        words = ".*".join(r"\s+".join(map(re.escape, part.split())) for part in line.split("…"))
        return re.search(words, self.printed) is not None

    def environment(self) -> dict[str, str]:
        """Return what commands of the document are run with."""
        others = ("CKPTSYNC_", "RANK", "WORLD_SIZE", "LOCAL_")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(others)}
        changes = {
            "HOME": str(self.home),
            "XDG_CACHE_HOME": f"{self.home}/cache",
            # DeepSpeed's; a killed compiler leaves a lock
            "TORCH_EXTENSIONS_DIR": clean.get("TORCH_EXTENSIONS_DIR", f"{self.home}/compiled"),
            "PATH": f"{self.home}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        return clean | QUICK | TRAINING | changes


@contextlib.contextmanager
def location(home: Path) -> Iterator[Location]:
    """Yield a location to run one document in; end what it serves."""
    for folder in ("work", "bin", *(p.removeprefix("/") for p in LOCATIONS)):
        (home / folder).mkdir(parents=True)
    for name, text in PROGRAMS.items():
        (home / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (home / "bin" / name).chmod(0o755)
    result = Location(home)
    try:
        yield result
    finally:
        for process in result._served:
            end(process)


def end(started: subprocess.Popen[str]) -> None:
    """End a process and its group by SIGTERM, which torchrun passes on; after 20 s by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(started.pid, number)
            started.wait(20)
