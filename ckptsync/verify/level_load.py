"""Level load: torch and safetensors load every tensor, in a child that is limited and sandboxed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from ckptsync import safe_open
from ckptsync.errors import Incomplete, StoreError, Unsupported
from ckptsync.layouts.file_names import DCP_SHARD, SAFETENSORS, TORCH
from ckptsync.records.report import Level, Reading, VerifyFinding
from ckptsync.stores.stream import Reads
from ckptsync.tensors import Extent
from ckptsync.verify.expected_files import ExpectedFile
from ckptsync.verify.level_digest import Item, find_archives
from ckptsync.verify.level_parse import UNLOADED
from ckptsync.verify.loader_process import LOAD_HINT, Died, LoaderProcess
from ckptsync.verify.tracked_files import CountedSource, TrackedFiles, copy_to, local_root

Answer = Mapping[str, Any]
"""What `load_child` answers."""
LIBRARIES = ("safetensors", "torch")


def load_files(
    source: CountedSource,
    files: Sequence[ExpectedFile],
    checkpoint: TrackedFiles,
) -> tuple[list[VerifyFinding], Reading]:
    """Load every file with tensors; ``checkpoint`` says where in its shards they lie.

    Raises Unsupported where no loader is installed, Incomplete if a file went away, StoreError.
    """
    loadable = [f for f in files if f.name.endswith((SAFETENSORS, *TORCH, DCP_SHARD))]
    has_items = any(file.name.endswith(DCP_SHARD) for file in loadable)
    archives = find_archives(checkpoint) if has_items else {}
    findings, answers = list[VerifyFinding](), list[Answer]()
    with LoaderProcess(source.progress) as child:
        for file in loadable:
            answer: Answer
            if not file.name.endswith(DCP_SHARD):
                kind = "safetensors" if file.name.endswith(SAFETENSORS) else "torch"
                answer = load_file(child, source.source, file, kind)
            elif file.path not in archives:
                answer = {"refused": "no readable .metadata says where in it tensors lie"}
            elif items := archives[file.path]:
                answer = load_file(child, source.source, file, "items", items)
            else:
                answer = {"refused": "it is compressed"}
            answers.append(answer)
            findings += _findings(file.shown, answer)
        loader = child.loader
    done = [a for a in answers if "tensors" in a]
    tensors = sum(a["tensors"] for a in done)
    summary = f"{tensors} tensors of {len(done)} files loaded with {loader}" if loader else ""
    nothing = "nothing to load: no file with tensors"
    findings.append(VerifyFinding("note", checkpoint.title, summary or nothing))
    size, of_size = sum(a["read"] for a in done), sum(file.size for file in loadable)
    return findings, Reading("load", len(done), size, len(loadable), of_size, tensors)


def load_file(
    child: LoaderProcess,
    source: Reads,
    file: ExpectedFile,
    kind: str,
    items: Sequence[Item] = (),
) -> Answer:
    """Load one file; return what the child answers.

    Its limits are far more than loading needs, so that only what hangs or blows up meets them.
    Raises what `LoaderProcess.ask` raises but Died, Incomplete, StoreError.
    """
    request = {
        "kind": kind,
        "items": items,
        "memory": 1 << 30,
        "cpu": 60 + file.size // (20 << 20),
        "wall": 300 + file.size // (2 << 20),
    }
    with open_file(source, file.name, file.size) as fd:
        try:
            return child.ask(request, [fd])
        except Died as e:
            return {"fault": str(e)}


def _findings(shown: str, answer: Answer) -> Iterator[VerifyFinding]:
    if fault := answer.get("fault"):
        yield VerifyFinding("load", shown, fault)
    if refused := answer.get("refused"):
        yield VerifyFinding("note", shown, f"{UNLOADED}{refused}")
    for name, count in answer.get("nonfinite", {}).items():
        detail = f"{name}: {count} values are not finite"
        yield VerifyFinding("nonfinite", shown, detail, tensors=(name,))
    if more := answer.get("more"):
        yield VerifyFinding(
            "nonfinite", shown, f"{more} more tensors have values that are not finite"
        )


@contextlib.contextmanager
def open_file(source: Reads, name: str, size: int) -> Iterator[int]:
    """Open a file, or a copy if it is not on this machine.  Raises Incomplete, StoreError."""
    root = local_root(source)
    if root is None:
        with tempfile.TemporaryFile() as copy:
            copy_to(copy, source, Extent(name, 0, size))
            yield copy.fileno()
        return
    try:
        fd = safe_open.open_file(root, name)
    except OSError as e:
        if safe_open.is_absence(e):
            raise Incomplete(f"{name}: not found") from e
        raise StoreError(f"{name}: {(e.strerror or str(e)).lower()}") from e
    try:
        yield fd
    finally:
        os.close(fd)


def require(level: Level) -> None:
    """Raise Unsupported, before anything is read, where level load's libraries are missing."""
    for library in LIBRARIES if level == "load" else ():
        if find_spec(library) is None:
            raise Unsupported(f"level load: {library} is not installed here", hint=LOAD_HINT)
