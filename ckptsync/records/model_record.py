"""The record of a consolidated model: its sources, and the digest of every file and tensor.

It also says how the model was made.

It holds no time, host or version: two heads that consolidate the same sources write the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptsync.records.store_paths import FORMAT
from ckptsync.typed_json import Count, FormatNumber


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of the consolidated model; path relative to it, BLAKE3 (64 hex).

    Its tensors' digests narrow damage, so it has no blocks.
    """

    path: str
    size: Count
    digest: str


@dataclass(frozen=True, slots=True)
class ModelTensor:
    """Where a tensor's bytes lie (``start`` counts from the file's first byte) and their BLAKE3."""

    name: str
    dtype: str
    shape: tuple[Count, ...]
    file: str
    start: Count
    size: Count
    digest: str


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """``manifests``: names of the records it was made from.

    ``options``: dtype, max_shard_size, source, config origin.

    ``left_out``: code in the checkpoint that the model does not have, a file's name or
    ``config.json: auto_map``.
    """

    run: str
    checkpoint: str
    location: str
    n: Count
    manifests: tuple[str, ...]
    options: dict[str, str]
    files: tuple[ModelFile, ...]
    tensors: tuple[ModelTensor, ...]
    left_out: tuple[str, ...] = ()
    format: FormatNumber = FORMAT

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the directories in it that hold a PEFT adapter, `""` for itself."""
        paths = (f.path.rpartition("/") for f in self.files)
        return tuple(
            sorted({above for above, _, name in paths if name.startswith("adapter_model")})
        )


def is_same_model(one: ModelRecord, other: ModelRecord) -> bool:
    """Whether ``one`` has the tensors of ``other``, by name and shape.

    What it has besides must be second copies, as of tied weights.
    """
    shapes = {t.name: t.shape for t in other.tensors}
    shared = [t for t in one.tensors if shapes.get(t.name) == t.shape]
    digests = {t.digest for t in shared}
    return (
        bool(shapes)
        and len(shared) == len(shapes)
        and all(t.name in shapes or t.digest in digests for t in one.tensors)
    )
