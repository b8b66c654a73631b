"""What Ray keeps of a checkpoint that is in a store: a directory of its own experiment, as it demands one, with a note of the location.

``<storage_path>/<experiment>/<checkpoint>/ckptsync.json``, some hundred bytes.  Ray deletes it as it deletes checkpoints (``num_to_keep``); what is in the
store goes by the store's own retention.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from typing import Any

from ckptsync.errors import Corrupt
from ckptsync.parsing import parse

NAME = "ckptsync.json"
_LARGEST = 64 * 1024  # bytes
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_LOCATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.~-]{0,199}")  # of another save of the same name: <checkpoint>~<save>


@dataclass(frozen=True, slots=True)
class Note:
    """``checkpoint`` of ``run`` lies at ``location`` of ``store``, a path or a URL without a password."""

    store: str
    run: str
    checkpoint: str
    location: str

    @property
    def url(self) -> str:
        """Of the location, for people and commands."""
        return f"{self.store}/{self.run}/{self.location}"


def encode(note: Note) -> bytes:
    """As a file."""
    return json.dumps({"ckptsync": 1, **asdict(note)}, indent=1).encode() + b"\n"


def decode(data: bytes, name: str) -> Note:
    """Raises Corrupt."""
    try:
        told = parse(data, name, "a note of a checkpoint in a store")
        found = [told[key] for key in ("store", "run", "checkpoint", "location")]
    except (KeyError, TypeError) as e:
        raise Corrupt(f"{name}: no note of a checkpoint in a store: {e}") from e
    if not all(isinstance(value, str) and value for value in found) or not all(map(_LOCATION.fullmatch, found[2:])):
        raise Corrupt(f"{name}: no note of a checkpoint in a store")
    return Note(*found)


def is_plain(name: str) -> bool:
    """Whether a store can keep a checkpoint under this name."""
    return bool(_PLAIN.fullmatch(name))


def write(filesystem: Any, folder: str, note: Note) -> None:
    """Through the pyarrow file system of Ray's storage; each rank writes the same.  Raises OSError."""
    filesystem.create_dir(folder, recursive=True)
    with filesystem.open_output_stream(f"{folder}/{NAME}") as out:
        out.write(encode(note))


def read(checkpoint: Any) -> Note | None:
    """Of a ``ray.train.Checkpoint``; ``None`` for one that holds its files itself.  Raises Corrupt, OSError."""
    path = f"{checkpoint.path}/{NAME}"
    try:
        with checkpoint.filesystem.open_input_stream(path) as stream:
            return decode(stream.read(_LARGEST), path)
    except FileNotFoundError:
        return None
