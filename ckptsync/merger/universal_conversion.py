"""Plan the conversion of ZeRO's shards into DeepSpeed's universal form, for any number of ranks.

ZeRO's shards resume only on as many ranks as wrote them.  The universal form has a file for each
parameter and optimizer state, so the conversion is a merge with other output files: per parameter
``zero/<name>/fp32.pt`` and a file for each state, as ``deepspeed/checkpoint/ds_to_universal.py``
(0.19.8) writes them; the model files as they are; and ``optimizer_state.pt``, which holds no shard
of rank 0 here: nothing reads that.  Pure but for small reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats import torch_archive, torch_zip
from ckptsync.formats.dtypes import ITEMSIZE, is_castable
from ckptsync.formats.pickles import brief
from ckptsync.formats.torch_archive import new_tensor
from ckptsync.formats.torch_pickle import StoredTensor
from ckptsync.gc_pause import paused
from ckptsync.layouts import registry
from ckptsync.layouts.file_names import BESIDE_WEIGHTS, inside, join, use_of
from ckptsync.layouts.registry import WeightsSource
from ckptsync.layouts.zero_files import UNIVERSAL, StateFile
from ckptsync.layouts.zero_optimizer_states import (
    ADVICE,
    BASE3,
    MASTER,
    STEP,
    Number,
    TrainedParameter,
    TrainingState,
    training_state,
)
from ckptsync.merger.plan import FilePlan, PlannedTensor, check_tiling
from ckptsync.merger.prepare import MAX_BESIDE, MergeJob
from ckptsync.safe_names import checked_path
from ckptsync.tensors import Copy, Extent, Files, MemoryFiles, Part, Tensor, read, read_whole

LATEST = "latest_universal"
_RESUMED = ("trainer_state.json", *BESIDE_WEIGHTS)
"""Files that are copied, too, beside those that `use_of` calls ``resuming``."""
_MOST_COMMON = 64 << 20  # bytes of tensors in what is the same for all ranks
_STAYS = (
    "DeepSpeed restores only what is trained from it: frozen parameters and buffers are those of"
    " the model that the training starts with"
)


def choose_shards(files: Files, name: str | None) -> WeightsSource:
    """Return the ZeRO shards to convert: the source ``name``, or that of the tag in `latest`.

    Raises Unsupported if there are none or several, or they are in a form that needs no conversion;
    without any weights the error of `registry.no_weights`.
    """
    sources = registry.sources(files)
    tags = [source for source in sources if source.layout == "zero"]
    if name is not None:
        source = registry.choose(files, name)
    elif len(tags) > 1:
        home = tags[0].root.rpartition("/")[0]
        root, _ = registry.deepspeed_tags(files, WeightsSource("whole", home))
        source = WeightsSource("zero", root) if root else registry.choose(files, "zero")
    elif sources:
        source = tags[0] if tags else sources[0]
    else:
        raise registry.no_weights(files)
    if source.layout == "zero":
        return source
    if source.layout == "universal":
        raise Unsupported(
            f"{source}: is in DeepSpeed's universal form already",
            hint="resume from it as it is, with load_universal in DeepSpeed's configuration",
        )
    if source.layout in ("dcp", "dcp_safetensors"):
        raise Unsupported(
            f"{source}: a distributed checkpoint of torch does not depend on the number of ranks",
            hint="resume from it as it is, on any number of ranks",
        )
    raise Unsupported(
        f"{source}: no shards of DeepSpeed's ZeRO", hint="only ZeRO-1, 2 and 3 are converted"
    )


@paused()
def prepare_universal(files: Files, name: str | None, tag: str) -> MergeJob:
    """Return the job of the conversion of one save; headers and files beside the shards are read.

    ``name``: of the shards, as `choose_shards` takes it; ``tag``: of shards that lie in no
    directory of their own.  Raises Incomplete, Unsupported or Corrupt.
    """
    source = choose_shards(files, name)
    state = training_state(files, source.root)
    home, _, tag_of_source = source.root.rpartition("/")
    tag = tag_of_source or tag
    plans = [
        *(_model_plan(join(tag, file.name.rpartition("/")[2]), file) for file in state.models),
        *(
            plan
            for parameter in state.parameters
            for plan in _parameter_plans(parameter, state, tag)
        ),
        *_other_plans(state.others, tag),
        FilePlan(f"{tag}/zero/optimizer_state.pt", _common_archive(state), ()),
    ]
    for plan in plans:
        checked_path(plan.name)
    contents = {
        base: read_whole(files, path, MAX_BESIDE)
        for base, path in sorted(inside(files.sizes(), home).items())
        if source.root and (use_of(base) == "resuming" or base in _RESUMED)
    }
    contents[LATEST] = tag.encode()
    holder = MemoryFiles(contents)
    return MergeJob(
        str(source),
        tuple(plans),
        tuple((base, holder) for base in contents),
        _notes(state),
        contents,
    )


def _notes(state: TrainingState) -> tuple[str, ...]:
    """Return the layout's remarks, what stage 3 does not restore, and a note on frozen weights."""
    names = {key for parameter in state.parameters for key in parameter.states}
    adam = {"exp_avg", "exp_avg_sq"}
    notes = [tensor.remark for tensor in state.others if tensor.remark]
    if state.stage == 3 and names != adam:
        notes.append(
            f"DeepSpeed 0.19 loads {' and '.join(sorted(adam))} at stage 3 and nothing else, and"
            f" these shards have {', '.join(sorted(names)) or 'no states'}"
        )
    if state.stage == 3:
        notes += _notes_on_shared(state.common)
    return (*notes, _STAYS)


def _notes_on_shared(common: Mapping[str, Any]) -> list[str]:
    """Return notes on what DeepSpeed makes equal for all parameter groups when it loads stage 3."""
    groups = [group for group in common["param_groups"] if isinstance(group, dict)]
    unequal = [
        key
        for key in ("lr", "betas", "eps", "weight_decay", "momentum")
        if len({_format(group.get(key)) for group in groups}) > 1
    ]
    notes = []
    if unequal:
        notes.append(
            f"DeepSpeed 0.19 gives all parameter groups at stage 3 the {', '.join(unequal)} of the"
            " first: set it again after loading"
        )
    steps = [state.get(STEP) for state in common[BASE3]["state"].values()]
    if len(steps) > 1 and isinstance(steps[0], StoredTensor):
        notes.append(
            f"DeepSpeed 0.19 lets the {len(steps)} groups of stage 3 share one step, which torch's"
            " Adam then counts up for each: losses differ a little from those on the same ranks"
        )
    return notes


def _format(value: object) -> str:
    """Return a value as a message shows it."""
    return ", ".join(map(brief, value[:4])) if isinstance(value, tuple) else brief(value)


def _model_plan(name: str, file: StateFile) -> FilePlan:
    """Return the plan of a model file's copy, with CRC32s.  Raises as `_file_parts`."""
    size = file.files.sizes()[file.name]
    tensor = PlannedTensor(name, "U8", (size,), 0, size, Copy("U8", (size,), (*_file_parts(file),)))
    return FilePlan(name, b"", (tensor,))


def _file_parts(file: StateFile) -> Iterator[Part]:
    """Yield a file's bytes in order, the records of its archive each by itself.

    Raises Corrupt if records overlap, and as `torch_zip.extent`, which reads each one's header.
    """
    archive, size, end_before = file.archive, file.files.sizes()[file.name], 0

    def piece(start: int, end: int) -> Part:
        """Return the bytes from ``start`` to ``end`` of the file as a part."""
        return Part((start,), (end - start,), Extent(file.name, start, end - start))

    if isinstance(archive, torch_zip.Archive):
        records = [
            (where, torch_zip.checksum(archive, name, where))
            for name in archive.records
            if (where := torch_zip.extent(file.files, archive, name)).size
        ]
        for where, checksum in sorted(records, key=lambda record: record[0].start):
            if where.start < end_before:
                raise Corrupt(f"{file.name}: records of its archive overlap")
            if where.start > end_before:
                yield piece(end_before, where.start)
            yield Part((where.start,), (where.size,), where, None, checksum)
            end_before = where.start + where.size
    if size > end_before:
        yield piece(end_before, size)


def _parameter_plans(
    parameter: TrainedParameter, state: TrainingState, tag: str
) -> Iterator[FilePlan]:
    """Yield a plan for the master, for each optimizer state and, below stage 3, for the step count.

    Raises Corrupt or Incomplete where parts of a tensor overlap or are missing.
    """
    tensor = parameter.tensor
    folder = f"{tag}/zero/{tensor.name}"
    for key, copy in ((MASTER, parameter.master), *parameter.states.items()):
        check_tiling(tensor, copy)
        if state.stage == 3:
            stored = new_tensor(copy.dtype, (prod(tensor.shape),))
            value: object = stored
        else:
            stored = new_tensor(copy.dtype, tensor.shape)
            value = {"cat_dim": 0, "param": stored}
        yield _streamed(f"{folder}/{key}.pt", tensor.name, value, stored, copy)
    if parameter.step is not None and state.stage < 3:
        yield FilePlan(f"{folder}/{STEP}.pt", _number(parameter.step), ())


def _other_plans(tensors: Sequence[Tensor], tag: str) -> Iterator[FilePlan]:
    """Yield a plan for each other floating tensor of the model file, in float32 as DeepSpeed does.

    Integers, which DeepSpeed makes floats of, are left out: the model file has them.  Raises
    Corrupt if parts do not tile a tensor.
    """
    for tensor in tensors:
        copy = tensor.copies[-1]
        if copy.absent or not is_castable(copy.dtype):
            continue
        check_tiling(tensor, copy)
        stored = new_tensor("F32", tensor.shape)
        name = f"{tag}/zero/{tensor.name}/{UNIVERSAL}"
        yield _streamed(name, tensor.name, {"param": stored}, stored, copy)


def _streamed(path: str, name: str, value: object, stored: StoredTensor, copy: Copy) -> FilePlan:
    """Return the plan of an archive of ``value``, whose tensor ``stored`` is read from ``copy``."""
    size = stored.numel * ITEMSIZE[stored.dtype]
    header, ending = torch_archive.streamed(value, size)
    tensor = PlannedTensor(name, stored.dtype, stored.shape, len(header), size, copy)
    return FilePlan(path, header, (tensor,), ending)


def _number(number: Number) -> bytes:
    """Return an archive of a number, as torch saves it."""
    return torch_archive.archive(number.value, lambda _: number.data)


def _common_archive(state: TrainingState) -> bytes:
    """Return ``optimizer_state.pt``, which is the same for all ranks.

    Tensors left in it are read.  Raises Unsupported if one is not contiguous, or if they have more
    than `_MOST_COMMON` bytes together.
    """
    bytes_left = _MOST_COMMON

    def data(stored: StoredTensor) -> bytes:
        """Read a tensor, and return its bytes; raise Unsupported as `_common_archive`."""
        nonlocal bytes_left
        part = state.first.part(stored)
        bytes_left -= part.extent.size
        if bytes_left < 0 or part.strides:
            raise Unsupported(
                f"{state.first.name}: large tensors beside masters and states, which nothing says"
                " how to join",
                hint=ADVICE,
            )
        return read(state.first.files, part.extent)

    return torch_archive.archive(dict(state.common), data)
