"""Levels load and model, by child processes that are limited and sandboxed.

Level load: torch and safetensors load every tensor.  Level model: the model's class takes exactly
these weights, the tokenizer loads, the model runs.  For that the child looks at a directory made
for it: configuration and tokenizer files copied, weights linked.  Weights in a store elsewhere are
copied if they are few enough to run the model; else a file of their size gets their header alone,
which is all that names and shapes need.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ckptsync import safe_open
from ckptsync.errors import Incomplete, StoreError, Unsupported
from ckptsync.layouts.file_names import DCP_SHARD, SAFETENSORS, TORCH
from ckptsync.records.report import Level, Reading, VerifyFinding
from ckptsync.stores.stream import Reads
from ckptsync.tensors import Extent
from ckptsync.verify.expected_files import ExpectedFile
from ckptsync.verify.level_digest import Item, find_archives
from ckptsync.verify.level_parse import UNLOADED, UNMODELLED
from ckptsync.verify.loader_process import Died, LoaderProcess
from ckptsync.verify.tracked_files import CountedSource, TrackedFiles, copy_to, local_root

LOAD_CHILD = "ckptsync.verify.load_child"
LOAD_HINT = "pip install 'ckptsync[load]'"
Answer = Mapping[str, Any]
"""What `load_child` answers."""
MODEL_CHILD = "ckptsync.verify.model_child"
MODEL_HINT = "pip install 'ckptsync[model]'"
LIBRARIES = ("safetensors", "torch", "transformers", "accelerate")
RUNS = 2 << 30
"""Bytes of weights with which a forward pass is made, at most."""
_SMALL = 64 << 20  # bytes of a configuration or tokenizer file
_HEADER = 100 << 20  # bytes: safetensors' own limit


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
    with LoaderProcess(LOAD_CHILD, LOAD_HINT, source.progress) as child:
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
    """Raise Unsupported, before anything is read, where a level's libraries are not installed."""
    needed = {"load": LIBRARIES[:2], "model": LIBRARIES}.get(level, ())
    for library in needed:
        if find_spec(library) is None:
            hint = f"pip install 'ckptsync[{level}]'"
            raise Unsupported(f"level {level}: {library} is not installed here", hint=hint)


def load_model(
    source: CountedSource,
    model: Mapping[str, ExpectedFile],
    title: str,
) -> tuple[list[VerifyFinding], Reading]:
    """Check one model, its files by path; ``title`` is its name in findings.

    Raises Unsupported where transformers is not installed, Incomplete, StoreError.
    """
    files = {path: file for path, file in model.items() if "/" not in path}
    size = sum(file.size for path, file in files.items() if path.endswith(SAFETENSORS))
    of_size = sum(file.size for file in model.values())
    unread = Reading("model", 0, 0, len(model), of_size)
    if "config.json" not in files or not any(path.endswith(SAFETENSORS) for path in files):
        detail = f"{UNMODELLED}there is no config.json with safetensors files beside it"
        return [VerifyFinding("note", title, detail)], unread
    shown, forward = files["config.json"].shown, size <= RUNS
    request = {
        "forward": forward,
        "memory": (4 << 30) + 4 * (size if forward else 0),
        "cpu": 300 + size // (20 << 20),
        "wall": 900 + size // (2 << 20),
    }
    child = LoaderProcess(MODEL_CHILD, MODEL_HINT, source.progress)
    with tempfile.TemporaryDirectory(prefix="ckptsync-model-") as made, child:
        if damaged := _fill(Path(made), source, files, forward=forward):
            unread_header = f"{UNMODELLED}the header of {damaged[0].name} cannot be read"
            return [*damaged, VerifyFinding("note", title, unread_header)], unread
        try:
            answer = child.ask({"directory": made, **request})
        except Died as e:
            return [VerifyFinding("load", shown, f"its model: {e}")], unread
        loader = child.loader
    count, run = len(model) if answer["tensors"] else 0, answer["run"]
    reading = Reading("model", count, size if run else 0, len(model), of_size, answer["tensors"])
    findings = [VerifyFinding("model", shown, fault) for fault in answer["faults"]]
    findings += [VerifyFinding("note", shown, f"{UNMODELLED}{note}") for note in answer["notes"]]
    if answer["odd"]:
        detail = f"{answer['odd']} of {run} values that the model computes are not finite"
        findings.append(VerifyFinding("nonfinite", title, detail))
    if not (answer["faults"] or answer["notes"]):
        why = "a forward pass returned no values" if forward else "not run: it is too large"
        how = "run on a few tokens" if run else why
        detail = (
            f"transformers accepts all of its {answer['tensors']} tensors; {how}, with {loader}"
        )
        findings.append(VerifyFinding("note", title, detail))
    return findings, reading


def _fill(
    made: Path,
    source: CountedSource,
    files: Mapping[str, ExpectedFile],
    *,
    forward: bool,
) -> list[VerifyFinding]:
    """Fill the child's directory; return findings for damaged headers.

    Raises Incomplete, StoreError.
    """
    root, damaged = local_root(source), list[VerifyFinding]()
    for path, file in files.items():
        is_weights = path.endswith(SAFETENSORS)
        if is_weights and root is not None:
            # A name in a store is no path of its own, so no `/` operator.
            (made / path).symlink_to(os.path.join(root, file.name))  # noqa: PTH118
            continue
        size = file.size
        if is_weights and not forward:
            head = bytearray(min(8, size))
            source.read_into(file.name, 0, memoryview(head))
            size = 8 + int.from_bytes(head, "little")
            if not 8 < size <= min(file.size, _HEADER):
                detail = f"{file.path}: a header of {size - 8} bytes"
                damaged.append(VerifyFinding("parse", file.shown, detail))
                continue
        if is_weights or size <= _SMALL:
            with (made / path).open("wb") as copy:
                copy_to(copy, source, Extent(file.name, 0, size))
                copy.truncate(file.size)  # a hole where the tensors are
    return damaged
