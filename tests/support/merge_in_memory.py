"""A merge into memory, and a small checkpoint to merge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ckptsync.merger.engine import Destination, MergeResult, Progress, Write, write_model
from ckptsync.merger.plan import MergeOptions, MergeResources
from ckptsync.merger.prepare import prepare
from ckptsync.stores.contract import Chunk
from ckptsync.tensors import Files
from tests.support.files_in_memory import safetensors_file

MODEL = safetensors_file({"w": ("F32", (2,), b"12345678"), "n": ("I64", (), b"abcdefgh")})
FILES = {
    "model.safetensors": MODEL,
    "config.json": b'{"dtype": "float32"}',
    "tokenizer.json": b"{}",
    "trainer_state.json": b"{}",
}


class Written(dict[str, bytes]):
    """What was written, in order."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        assert name not in self
        self[name] = b"".join(map(bytes, chunks))


def consolidate(
    files: Files,
    write: Write,
    options: MergeOptions,
    config: Sequence[Files] = (),
    progress: Progress | None = None,
    *,
    work: MergeResources | None = None,
) -> MergeResult:
    """Write the consolidated model through ``write(name, chunks)``.

    ``config`` are further locations for configuration and tokenizer.
    """
    return write_model(prepare(files, options, config), files, Destination(write), progress, work)


def run(
    files: Files,
    options: MergeOptions | None = None,
    config: tuple[Files, ...] = (),
    work: MergeResources | None = None,
) -> tuple[Written, MergeResult]:
    written = Written()
    return written, consolidate(files, written.write, options or MergeOptions(), config, work=work)
