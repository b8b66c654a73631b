"""Where a trial of ``Trainer.hyperparameter_search`` saves: below the output directory, under a name that no callback is told.

The name is ``run-N``, ``run-<id>``, or what the user's ``hp_name`` gives (transformers 5.23, ``Trainer._get_output_dir``).  It is seen at the first
``on_save``: this rank has just written its own last file there.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.parsing import parse

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,59}")  # what a store can keep before a checkpoint's name


def trial_of(output_dir: Path, checkpoint: str, last: str, said: Mapping[str, Any] | None = None) -> str:
    """The directory below ``output_dir`` in which ``last``, of that checkpoint, is the newest; empty if there is none with a plain name.

    ``said``: what must stand in that file, if it is ``trainer_state.json``: searches that share a directory have trials at the same time.
    """
    found = []
    for path in output_dir.glob(f"*/{checkpoint}/{last}"):
        name = path.parent.parent.name
        with contextlib.suppress(OSError, Corrupt):  # gone, or another trial's that is being written
            if _PLAIN.fullmatch(name) and (said is None or _says(parse(path.read_bytes(), str(path)), said)):
                found.append((path.stat().st_mtime_ns, name))
    return max(found, default=(0, ""))[1]


def place(output_dir: Path, checkpoint: str) -> Path:
    """Where a checkpoint lies by the name that we give it: ``run-0.checkpoint-4`` is ``run-0/checkpoint-4``, as `ckptsync.scan` has it."""
    trial, _, name = checkpoint.rpartition(".")
    return output_dir / trial / name


def named(trial: str, checkpoint: str) -> str:
    """The name of a trial's checkpoint, or of one without a trial."""
    return f"{trial}.{checkpoint}" if trial else checkpoint


def _says(told: Any, wanted: Mapping[str, Any]) -> bool:
    """Compared as it is written: NaN is NaN, and tuples are lists."""
    return isinstance(told, dict) and all(json.dumps(told.get(key)) == json.dumps(value) for key, value in wanted.items())
