"""Whole models that ``save_pretrained`` writes: ``model.safetensors``, or files with an index.

Files of ``torch.save`` are named in the same ways, so `whole_bin` uses `model_files` and
`model_tensors`, too: with a stem (``model``), an end (``.safetensors``), and between them nothing,
or ``-00001-of-00004``; the index is ``<stem><end>.index.json``. Source: ``save_pretrained`` of
transformers 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from ckptsync.errors import Corrupt
from ckptsync.formats import safetensors
from ckptsync.layouts.file_names import home, inside, join
from ckptsync.plain_json import parse
from ckptsync.safe_names import checked_path
from ckptsync.tensors import Files, Tensor, read_whole

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_END = ".safetensors"
_NUMBERED = re.compile(r"model-[0-9]{5}-of-[0-9]{5}\.safetensors")


def roots(names: Collection[str]) -> tuple[str, ...]:
    """Return the first of `HOMES` that holds such a model, in a tuple; () if none does."""
    return home(
        names, lambda own: SINGLE in own or INDEX in own or any(map(_NUMBERED.fullmatch, own))
    )


def demands(files: Files, root: str) -> dict[str, int | None]:
    """Return the model's files, and the index if there is one. Raise Corrupt for a wrong index."""
    return model_files(files, join(root, "model"), _END)


def tensors(files: Files, root: str) -> tuple[Tensor, ...]:
    """Return every tensor of every file; raise as `model_tensors`; Corrupt for a damaged file."""
    return model_tensors(files, join(root, "model"), _END, safetensors.tensors)


def model_files(files: Files, stem: str, end: str) -> dict[str, int | None]:
    """Return the files of a model, whether they exist or not; their sizes are None.

    They are the index and its files; without an index the single file, or, if that is absent and
    numbered ones exist, all of that number. Raise Corrupt if the index is wrong, or if there is
    none and numbered files are of several sets.
    """
    names = files.sizes()
    index, single = f"{stem}{end}.index.json", stem + end
    if index in names:
        return dict.fromkeys((index, *sorted(set(_weight_map(files, index, end).values()))))
    folder, _, base = stem.rpartition("/")
    numbered = re.compile(rf"{re.escape(base)}-[0-9]{{5}}-of-([0-9]{{5}}){re.escape(end)}")
    counts = {int(m[1]) for m in map(numbered.fullmatch, inside(names, folder)) if m}
    if len(counts) > 1:
        raise Corrupt(f"{stem}: numbered model files of {len(counts)} different sets")
    if counts and single not in names:
        total = counts.pop()
        return {f"{stem}-{n:05d}-of-{total:05d}{end}": None for n in range(1, total + 1)}
    return {single: None}


def model_tensors(
    files: Files, stem: str, end: str, read_tensors: Callable[[Files, str], Iterable[Tensor]]
) -> tuple[Tensor, ...]:
    """Return every tensor of the files of `model_files`, each read with ``read_tensors``.

    Raise Corrupt if a name is in two files, or if the index gives tensors other files or names. The
    caller checks `demands` first: both layouts raise KeyError for a missing file.
    """
    by_name: dict[str, Tensor] = {}
    actual: dict[str, str] = {}
    for name in model_files(files, stem, end):
        for tensor in read_tensors(files, name) if name.endswith(end) else ():
            if tensor.name in by_name:
                raise Corrupt(f"{name}: {tensor.name} is also in {actual[tensor.name]}")
            by_name[tensor.name], actual[tensor.name] = tensor, name
    index = f"{stem}{end}.index.json"
    if index in files.sizes():
        indexed = _weight_map(files, index, end)
        odd = sorted(
            key for key in indexed.keys() | actual.keys() if indexed.get(key) != actual.get(key)
        )
        if odd:
            raise Corrupt(f"{index}: {len(odd)} tensors are not where it says, such as {odd[0]}")
    return tuple(by_name.values())


def _weight_map(files: Files, index: str, end: str) -> dict[str, str]:
    """Read an index, and return the path of each tensor's file.

    Raise Corrupt if it is no index, or if a file in it does not lie beside it or end with ``end``.
    """
    try:
        weight_map = parse(read_whole(files, index), index, "an index")["weight_map"]
        for value in weight_map.values():
            if "/" in checked_path(value) or not value.endswith(end):
                raise Corrupt(f"{index}: {value!r:.100} is not a file beside it")
        return {
            str(key): join(index.rpartition("/")[0], value) for key, value in weight_map.items()
        }
    except (KeyError, TypeError, AttributeError) as e:
        raise Corrupt(f"{index}: not an index: {type(e).__name__}: {e}") from e
