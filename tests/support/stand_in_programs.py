"""Programs that run beside the stand-ins for transformers and LLaMA-Factory (`tests/stand_in`)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
STAND_IN = ROOT / "tests" / "stand_in"
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if not name.startswith(("CKPTSYNC_", "PYTHON", "COVERAGE"))
    and name not in ("RANK", "WORLD_SIZE")
}
STEPS = 3  # of the stand-in's training
PINS = {*(f"checkpoint-{step}.0" for step in range(1, STEPS + 1)), "final.0"}


def program(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a Python without the stand-ins; return how it ended."""
    return ran(*words, path=(ROOT,), OMP_NUM_THREADS="1")


def ran(
    *words: str,
    python: str = sys.executable,
    path: Sequence[Path] = (STAND_IN, ROOT),
    cwd: Path = ROOT,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run a Python, with directories before its own packages and variables; return how it ended."""
    environment = {
        **CLEAN,
        **({"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}),
        **variables,
    }
    return subprocess.run(
        [python, *words],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=environment,
        timeout=3600,
    )
