"""A merge into memory, and a small checkpoint to merge."""

from __future__ import annotations

from collections.abc import Iterable

from ckptsync.merge.consolidate import Chunk, Merged, consolidate
from ckptsync.merge.copying import Work
from ckptsync.merge.plan import Options
from ckptsync.model import Files
from tests.plain_files import safetensors_file

MODEL = safetensors_file({"w": ("F32", (2,), b"12345678"), "n": ("I64", (), b"abcdefgh")})
FILES = {"model.safetensors": MODEL, "config.json": b'{"dtype": "float32"}', "tokenizer.json": b"{}", "trainer_state.json": b"{}"}


class Written(dict[str, bytes]):
    """What was written, in order."""

    def write(self, name: str, chunks: Iterable[Chunk]) -> None:
        assert name not in self
        self[name] = b"".join(map(bytes, chunks))


def run(
    files: Files, options: Options | None = None, config: tuple[Files, ...] = (), work: Work | None = None
) -> tuple[Written, Merged]:
    written = Written()
    return written, consolidate(files, written.write, options or Options(), config, work=work)
