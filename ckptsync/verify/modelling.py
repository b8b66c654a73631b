"""Level model: the class that the configuration names takes exactly these weights, the tokenizer loads, and a small model runs.

A limited child process looks at a directory made for it: configuration and tokenizer files copied, weights linked, or of a store elsewhere either
copied, where they are few enough to run the model, or as long as they are and empty but for their headers, which is all that names and shapes need.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from ckptsync.errors import Corrupt, Incomplete, NotFound, StoreError
from ckptsync.model import Extent
from ckptsync.records.report import LEVELS, Finding, Level, Reading
from ckptsync.stores.opening import directory_of
from ckptsync.stores.tree import LocalFiles
from ckptsync.verify.loading import loading
from ckptsync.verify.process import Died, Loader
from ckptsync.verify.reading import Counted, Told, pieces
from ckptsync.verify.structure import UNMODELLED

HINT = "pip install 'ckptsync[model]'"
RUNS = 2 << 30
"""Bytes of weights with which a forward pass is made, at most."""
_SMALL = 64 << 20  # bytes of a configuration or tokenizer file
_WEIGHTS = ".safetensors"
_HEADER = 100 << 20  # bytes: safetensors' own limit

Where = Mapping[str, tuple[str, int]]
"""Path in the model → the source's name for it, and its size."""
Name = Callable[[str], str]


def models(source: Counted, where: Where, name: Name, told: Told = lambda _: None) -> tuple[list[Finding], Reading]:
    """Look at one model, as findings under ``name`` of its paths.  Raises Unsupported where no transformers is installed, Incomplete, StoreError."""
    weights = {path: size for path, (_, size) in where.items() if "/" not in path and path.endswith(_WEIGHTS)}
    size = sum(weights.values())
    reading = Reading("model", 0, 0, len(where), sum(size for _, size in where.values()))
    if "config.json" not in where or not weights:
        return [Finding("note", name(""), f"{UNMODELLED}there is no config.json with safetensors files beside it")], reading
    forward = size <= RUNS
    with tempfile.TemporaryDirectory(prefix="ckptsync-model-") as made, modelling(told) as child:
        if wrong := _fill(Path(made), source, where, forward=forward):
            note = Finding("note", name(""), f"{UNMODELLED}the header of {wrong[0][0]} cannot be read")
            return [*(Finding("parse", name(path), str(e)) for path, e in wrong), note], reading
        limits = {
            "memory": (4 << 30) + 4 * (size if forward else 0),
            "cpu": 300 + size // (20 << 20),
            "wall": 900 + size // (2 << 20),
        }
        try:
            answer = child.ask({"directory": made, "forward": forward, **limits})
        except Died as e:
            return [Finding("load", name("config.json"), f"its model: {e}")], reading
        loader = child.loader
    found = list(_findings(answer, name, loader, forward=forward))
    read = size if answer["run"] else 0
    return found, Reading(
        "model", len(where) if answer["tensors"] else 0, read, reading.of_files, reading.of_size, answer["tensors"]
    )


def modelling(told: Told = lambda _: None) -> Loader:
    """The child, for `models`."""
    return Loader("ckptsync.verify.model_child", HINT, told)


def require(level: Level) -> None:
    """Raise Unsupported, before anything is read, where what a level needs is not installed."""
    needed = {"load": (loading,), "model": (loading, modelling)}.get(level, ())
    for made in needed:
        with made() as child:
            child.start()


def climb(level: Level, steps: Iterable[Callable[[], object]]) -> None:
    """Take one step for each of `LEVELS`, in their order, as far as ``level``.  Raises as `require` does, before the first."""
    require(level)
    for _, step in zip(LEVELS[: LEVELS.index(level) + 1], steps, strict=False):
        step()


def _findings(answer: Mapping[str, object], name: Name, loader: str, *, forward: bool) -> Iterator[Finding]:
    for fault in answer["faults"]:  # type: ignore[attr-defined]
        yield Finding("model", name("config.json"), fault)
    for note in answer["notes"]:  # type: ignore[attr-defined]
        yield Finding("note", name("config.json"), f"{UNMODELLED}{note}")
    if answer["odd"]:
        yield Finding("nonfinite", name(""), f"{answer['odd']} of {answer['run']} values that the model computes are not finite")
    if not (answer["faults"] or answer["notes"]):
        run = "run on a few tokens" if answer["run"] else f"not run: {'nothing came out' if forward else 'it is too large'}"
        yield Finding("note", name(""), f"{answer['tensors']} tensors are those of the model's class; {run}, with {loader}")


def _fill(made: Path, source: Counted, where: Where, *, forward: bool) -> list[tuple[str, Corrupt]]:
    """Paths of what is damaged, and how.  Raises Incomplete, StoreError."""
    inner, wrong = source.source, list[tuple[str, Corrupt]]()
    root = inner.root if isinstance(inner, LocalFiles) else directory_of(inner)
    for path, (name, size) in where.items():
        if "/" in path:
            continue  # nothing that a model is made of lies deeper
        at = made / path
        if path.endswith(_WEIGHTS) and root is not None:
            at.symlink_to(os.path.join(root, name))  # noqa: PTH118 - a name in a store is no path of its own
        elif path.endswith(_WEIGHTS) and not forward:
            try:
                _header(at, source, name, size)
            except Corrupt as e:
                wrong.append((path, e))
        elif path.endswith(_WEIGHTS) or size <= _SMALL:
            _copy(at, source, Extent(name, 0, size))
    return wrong


def _copy(at: Path, source: Counted, extent: Extent) -> None:
    try:
        with at.open("wb") as file:
            for piece in pieces(source, extent):
                file.write(piece)
    except NotFound as e:
        raise Incomplete(f"{extent.file}: not there") from e
    except OSError as e:
        raise StoreError(f"{extent.file}: no room for a copy: {(e.strerror or str(e)).lower()}", hint="set TMPDIR") from e


def _header(at: Path, source: Counted, name: str, size: int) -> None:
    """The header, and a hole where the tensors are."""
    head = bytearray(min(8, size))
    source.read_into(name, 0, memoryview(head))
    length = 8 + int.from_bytes(head, "little")
    if not 8 < length <= min(size, _HEADER):
        raise Corrupt(f"{name}: a header of {length - 8} bytes")
    _copy(at, source, Extent(name, 0, length))
    os.truncate(at, size)
