"""DeepSpeed's pipelines: one file for each layer, and the model files of the stages.

Layer files have no names of parameters. Model files have names and no weights.

``PipelineModule`` names layer 3's parameters ``3.<name>``; a module that several layers share is
``tied_modules.<key>`` instead, and its layers' files do not say so.  The stages name their
parameters under ZeRO and ``BF16_Optimizer``; a file is matched with a tied module if only one can
be meant.  Sources: ``save_state_dict`` and ``_build`` of ``deepspeed/runtime/pipe/module.py``,
0.19.8.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ckptsync.errors import Incomplete, Unsupported
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.layouts.zero_files import (
    LAYER,
    StateFile,
    ZeroFiles,
    buffer_names,
    named_layer_files,
    trained_shapes,
)
from ckptsync.tensors import Shape

_TIED = "tied_modules."


def layer_weights(
    files: ZeroFiles, models: Sequence[StateFile]
) -> dict[str, tuple[StateFile, StoredTensor]]:
    """Return every layer's tensors under ``PipelineModule``'s names.

    Raises Incomplete if a layer that a stage names has no file, Unsupported if the stages name no
    parameters: then nothing proves that all files are here.
    """
    trained = {name: shape for model in models for name, shape in trained_shapes(model).items()}
    named = trained.keys() | set().union(*map(buffer_names, models))
    if not trained:
        raise Unsupported(
            f"{files.root or '.'}: a pipeline that was trained without ZeRO and without bf16: its"
            " files name no parameters",
            hint="save the model itself from the training program",
        )
    found: dict[str, tuple[StateFile, StoredTensor]] = {}
    for name in files.layer_files():
        file = files.load(name)
        odd = next((k for k, v in file.content.items() if not _is_named_tensor(k, v)), None)
        if odd is not None:
            raise Unsupported(f"{file.name}: {brief(odd)} is no tensor, expected in a layer's file")
        number = _number(name)
        is_named = any(f"{number}.{key}" in named for key in file.content)
        prefix = f"{number}." if is_named else _tied_prefix(number, file.content, trained, named)
        for key, value in file.content.items():
            _check_same(found.setdefault(prefix + key, (file, value)), (file, value))
    lost = sorted(named - found.keys())
    if lost:
        absent = next(iter(named_layer_files(files.root, lost)), files.root or ".")
        raise Incomplete(
            f"{absent}: not found; {len(lost)} tensors, such as {lost[0]}, are in no layer's file",
            hint="each node writes the files of its own layers: add the other nodes' directories",
        )
    return found


def missing_layers(files: ZeroFiles) -> str:
    """Return a remark on layers that have no file, which is right for functions.

    Of frozen layers nothing else shows it.
    """
    there = {_number(name) for name in files.layer_files()}
    missing = [str(n) for n in range(max(there, default=0)) if n not in there]
    return (
        f"layers {', '.join(missing[:20])} have no file: right if they are functions, without"
        " weights"
        if missing
        else ""
    )


def _is_named_tensor(key: object, value: object) -> bool:
    return isinstance(key, str) and isinstance(value, StoredTensor)


def _number(name: str) -> int:
    match = LAYER.fullmatch(name.rpartition("/")[2])
    return int(match[1]) if match else 0


def _tied_prefix(
    number: int,
    tensors: Mapping[str, StoredTensor],
    trained: Mapping[str, Shape],
    named: Iterable[str],
) -> str:
    """Return the prefix of the one tied module that has just these names and shapes.

    A layer that trains nothing keeps its number.
    """
    modules: dict[str, set[str]] = {}
    for name in named:
        if name.startswith(_TIED):
            key, _, rest = name.removeprefix(_TIED).partition(".")
            modules.setdefault(key, set()).add(rest)
    fits = [
        key
        for key, own in sorted(modules.items())
        if own <= tensors.keys()
        and all(trained.get(f"{_TIED}{key}.{k}", t.shape) == t.shape for k, t in tensors.items())
    ]
    if len(fits) > 1:
        raise Unsupported(
            f"layer {number}: tied modules {', '.join(fits)} have the same shapes, and nothing says"
            " which one it is",
            hint="save the model itself from the training program",
        )
    return f"{_TIED}{fits[0]}." if fits else f"{number}."


def _check_same(one: tuple[StateFile, StoredTensor], other: tuple[StateFile, StoredTensor]) -> None:
    """Raise Unsupported unless two layers' files hold the same bytes of a tied module.

    Their CRC32s show it.
    """
    if one == other or not other[1].numel:
        return
    sums = [
        part.checksum and (part.checksum.crc32, part.extent.size)
        for part in (file.part(value) for file, value in (one, other))
    ]
    if sums[0] != sums[1] or sums[0] is None:
        raise Unsupported(
            f"{other[0].name}: has the names and shapes of a tied module that {one[0].name} holds,"
            " and other values",
            hint=(
                "a frozen layer beside tied ones? Nothing in the checkpoint tells them apart: save"
                " the model itself"
            ),
        )
