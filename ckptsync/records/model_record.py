"""The record of a consolidated model: what it was made of, and the digest of every file and tensor.

Two heads may make one model at once. So the record holds no time, host or version: heads that
consolidate the same sources with the same options write the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ckptsync.records.store_paths import FORMAT
from ckptsync.typed_json import Count, FormatNumber


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of the consolidated model: its path in the model, its size, and its BLAKE3 (64 hex).

    It has no blocks: the digests of its tensors tell where damage lies.
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
    """A consolidated model of a location.

    ``manifests``: names of the manifests that it was made from. ``options``: dtype, max_shard_size,
    source, and where its configuration came from. ``left_out``: code that the checkpoint has and
    the model has not, as a file's name or ``config.json: auto_map``.
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
        """Return the model's directories that have an ``adapter_model…`` file; `""` is its own."""
        paths = (f.path.rpartition("/") for f in self.files)
        return tuple(
            sorted({above for above, _, name in paths if name.startswith("adapter_model")})
        )


def is_same_model(larger: ModelRecord, other: ModelRecord) -> bool:
    """Return whether ``larger`` has all tensors of ``other``, with the same names and shapes.

    Further tensors of ``larger`` must be copies of those by digest, as tied weights are. False if
    ``other`` has no tensor.
    """
    shapes = {t.name: t.shape for t in other.tensors}
    in_both = [t for t in larger.tensors if shapes.get(t.name) == t.shape]
    digests = {t.digest for t in in_both}
    return (
        bool(shapes)
        and len(in_both) == len(shapes)
        and all(t.name in shapes or t.digest in digests for t in larger.tensors)
    )
