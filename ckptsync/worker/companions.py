"""Find what opens a model and is not in its checkpoint: the configuration and the tokenizer, where this node can know them.

A sharded save often holds weights alone.  This looks in the run's directory, then in the local directory of the model that the training names: in
`adapter_config.json`, `config.json` or `training_args.bin`, or to the hook.  No link is followed, and nothing is fetched from a network.
What is found is sent as the checkpoint's own files are, so a head trusts it no more than those.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ckptsync.errors import CkptsyncError
from ckptsync.formats import torch_pickle, torch_save
from ckptsync.formats.pickles import AnyClass, Made
from ckptsync.layouts.rank_names import ranks
from ckptsync.merge.output import NAMES
from ckptsync.model import Extent, read, read_whole
from ckptsync.parsing import parse
from ckptsync.scan import FINAL, NESTED, Spot
from ckptsync.spool.marks import begun
from ckptsync.walk import OURS, walk
from ckptsync.worker.snapshot import Held, Hold

YOUNG = 2.0  # seconds: whoever writes a configuration or a tokenizer may still be at it
_MOST = 64 << 20  # bytes of one file
_LARGE = 1 << 20  # bytes of JSON: a worker beside a training parses no more
_MOST_ARGUMENTS = 256 << 10  # bytes of a file that names a model: some 10,000 are usual
_ARGUMENTS = "training_args.bin"
_NAMED_IN = ("adapter_config.json", "config.json", _ARGUMENTS)
_KEYS = ("base_model_name_or_path", "model_name_or_path", "pretrained_model_name_or_path", "model_path", "_name_or_path")


@dataclass(frozen=True, slots=True)
class _Kind:
    """Files that belong together: all are of one directory.  A directory has them if it has one of ``marks``.

    That file must have one of the keys ``says``, if there are any: scripts call a configuration of their own `config.json`, too.
    """

    names: tuple[str, ...]
    marks: tuple[str, ...]
    says: tuple[str, ...] = ()

    @property
    def own(self) -> tuple[str, ...]:
        """Names by which a checkpoint has it itself."""
        return self.marks if self.says else self.names


_CONFIG = _Kind(("config.json", "generation_config.json"), ("config.json",), ("model_type", "architectures"))
_ADAPTER = _Kind(("adapter_config.json",), ("adapter_config.json",), ("peft_type",))
_PROCESSING = _Kind(
    tuple(n for n in NAMES if n not in (*_CONFIG.names, *_ADAPTER.names, "quantization_config.json")),
    ("tokenizer_config.json", "tokenizer.json", "processor_config.json", "preprocessor_config.json"),
)
_TELLING = (*_CONFIG.says, *_ADAPTER.says)


def companions(hold: Hold, spot: Spot, stored: Iterable[str] = ()) -> dict[str, Held]:
    """Return the files, by name, that a checkpoint lacks and that lie where this node can know them.

    Nothing is added of a kind that the checkpoint has, at whatever depth, nor under a name that it has.  ``stored``: paths of it that are in the store.
    """
    there = {path.rpartition("/")[2] for path in (*hold.held, *stored)}
    lacking = [kind for kind in (_CONFIG, _ADAPTER, _PROCESSING) if there.isdisjoint(kind.own)]
    found: dict[str, Held] = {}
    around = _around(spot)
    for folder in around if lacking else ():
        _add(found, _held(folder), lacking)
    if _ADAPTER not in lacking or _ADAPTER.marks[0] in found:
        lacking = [kind for kind in lacking if kind is not _CONFIG]  # its base model's configuration does not open an adapter
    lacking = [kind for kind in lacking if kind is not _ADAPTER]
    for folder in _named(hold, found, around) if _lacks(found, lacking) else ():
        beside = _held(folder)
        if _mark(beside, _CONFIG):  # only of a directory that is a model's
            _add(found, beside, lacking)
    return {name: held for name, held in found.items() if name not in there}


def is_of_first(hold: Hold) -> bool:
    """Whether this node's part tells what the checkpoint has besides its shards: rank 0 writes that."""
    here = ranks(hold.held)
    return not here or 0 in here


def at_rest(found: Mapping[str, Held], young: float = YOUNG) -> Mapping[str, Held]:
    """Return ``found``, or nothing as long as one of the files was written less than ``young`` seconds ago."""
    now = time.time()
    return {} if any(abs(now - held.stat.mtime / 1e9) < young for held in found.values()) else found


def _around(spot: Spot) -> tuple[Path, ...]:
    """The run's directory, nearest first."""
    if spot.name == FINAL:
        return ()  # it is what lies there
    home = spot.path if spot.only is not None else spot.path.parent
    return (home, home.parent) if home.name in NESTED else (home,)


def _lacks(found: Mapping[str, Held], kinds: Iterable[_Kind]) -> bool:
    return any(found.keys().isdisjoint(kind.names) for kind in kinds)


def _add(found: dict[str, Held], beside: Mapping[str, Held], kinds: Iterable[_Kind]) -> None:
    for kind in kinds:
        if found.keys().isdisjoint(kind.names) and _mark(beside, kind):
            its = {name: beside[name] for name in kind.names if name in beside}
            if all(_is_whole(held) for held in its.values()):
                found.update(its)


def _held(folder: Path) -> dict[str, Held]:
    """Return the regular files of a directory that may stand beside a model."""
    with contextlib.suppress(CkptsyncError):  # what cannot be looked at is as good as not there
        return {f.path: Held(f, folder, is_pinned=False, is_added=True) for f in walk(folder, NAMES).files if f.size <= _MOST}
    return {}


def _mark(beside: Mapping[str, Held], kind: _Kind) -> bool:
    told = (_told(beside[name]) for name in kind.marks if name in beside)
    return any(each is not None and (not kind.says or any(map(each.get, kind.says))) for each in told)


def _is_whole(held: Held) -> bool:
    """Whether it can be parsed, as far as its name says how: half of one is being written."""
    return not held.stat.path.endswith(".json") or _told(held) is not None


@lru_cache(maxsize=256)
def _told(held: Held) -> Mapping[str, Any] | None:
    """Return what a JSON file says of its kind; None if it is not whole.  Of a large one only the end is read."""
    files, name, size = _hold_of(held), held.stat.path, held.stat.size
    with contextlib.suppress(CkptsyncError):
        if size > _LARGE:
            return {} if read(files, Extent(name, size - 64, 64)).rstrip().endswith((b"}", b"]")) else None
        content = parse(read_whole(files, name), name)
        return {key: content[key] for key in _TELLING if key in content} if isinstance(content, dict) else {}
    return None


def _named(hold: Hold, found: Mapping[str, Held], around: Sequence[Path]) -> Iterator[Path]:
    """The local directories of the model that a training says it began with."""
    held = [hold.held.get(name) or found.get(name) for name in _NAMED_IN]
    arguments = [Held(f, home, is_pinned=False) for home in around for f in _arguments(home)]
    said = [name for each in (*held, *arguments) if each for name in _models(each)]
    said += [b.facts.get("base_model", "") for home in around for b in reversed(begun(home / OURS))]
    for name in dict.fromkeys(said):
        if name.startswith("/") and os.path.isdir(name):  # noqa: PTH112  # Path.is_dir raises for a name that is too long
            yield Path(name)


def _arguments(home: Path) -> Iterator[Any]:
    with contextlib.suppress(CkptsyncError):
        yield from walk(home, (_ARGUMENTS,)).files


@lru_cache(maxsize=256)
def _models(held: Held) -> tuple[str, ...]:
    """Return what a file calls the model.  A pickle is read by the machine that runs nothing."""
    if held.stat.size > _MOST_ARGUMENTS:
        return ()
    name, content = held.stat.path, None
    with contextlib.suppress(CkptsyncError):
        if name == _ARGUMENTS:
            found, _ = torch_save.load(_hold_of(held), Extent(name, 0, held.stat.size), AnyClass(torch_pickle.ALLOWED))
            content = found.state if isinstance(found, Made) else found
        else:
            content = parse(read_whole(_hold_of(held), name), name)
    said = [content.get(key) for key in _KEYS] if isinstance(content, dict) else []
    return tuple(value for value in said if isinstance(value, str))


def _hold_of(held: Held) -> Hold:
    return Hold("", "trainer", {held.stat.path: held})
