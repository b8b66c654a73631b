"""Say what is in a checkpoint without merging it: sources of weights, tensors, missing files.

For each source, the merge is planned to the last byte, and the plan is dropped: what planning
raises is what a merge would raise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptsync.errors import Corrupt, Incomplete, Unsupported
from ckptsync.layouts import file_names, registry
from ckptsync.layouts.registry import WeightsSource
from ckptsync.merger.completeness import DOUBT
from ckptsync.merger.inputs import check_one_save
from ckptsync.merger.plan import MergeOptions
from ckptsync.merger.prepare import prepare
from ckptsync.stores.checkpoint_files import FileTree
from ckptsync.tensors import Demands, Files, Tensor


@dataclass(frozen=True, slots=True)
class InspectedTensor:
    """A tensor of the model: the element types that are ``stored``, and what it is ``tied`` to."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: tuple[str, ...]
    tied: str | None


@dataclass(frozen=True, slots=True)
class InspectedSource:
    """One set of weights in a checkpoint, as ``--source`` spells it.

    ``state``: complete, incomplete, corrupt or unsupported, with why in ``detail``; ``exit_code``:
    that of a merge.  ``writes``: model or adapter.
    """

    source: str
    state: str
    detail: str
    exit_code: int
    writes: str
    tensors: tuple[InspectedTensor, ...]


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything that is known of a checkpoint.

    ``preferred``: the source that a merge takes, None where several are equally good.  ``ranks``:
    those whose files are here.  ``missing``, ``missing_for_resume``: names of files.
    ``exit_code``: that of Corrupt if anything is corrupt, else the first source's.
    """

    sources: tuple[InspectedSource, ...]
    preferred: str | None
    world_size: int | None
    ranks: tuple[int, ...]
    missing: tuple[str, ...]
    missing_for_resume: tuple[str, ...]
    notes: tuple[str, ...]
    files: int
    bytes: int
    exit_code: int


def inspect_checkpoint(files: Files, locations: Sequence[FileTree] = ()) -> Inspection:
    """Return everything that is known of a checkpoint.

    ``locations``: the directories that it lies in, whose files' times say whether they are of one
    save.  What is damaged is said in the result; raises Unsupported or Incomplete only where there
    are no weights.
    """
    weights_sources = registry.sources(files)
    if not weights_sources:
        raise registry.no_weights(files)
    sources = tuple(_inspect_source(files, source, locations) for source in weights_sources)
    codes = [source.exit_code for source in sources]
    demands, preferred, notes = Demands(), None, []
    try:
        demands = registry.demands(files)
    except (Corrupt, Unsupported) as e:
        notes.append(f"cannot tell which files are missing: {e}")
        codes.append(e.exit_code)
    try:
        preferred = str(registry.choose(files, None))
    except Unsupported as e:  # several sources are equally good
        notes.append(f"{e}: {e.hint}")
    return Inspection(
        sources,
        preferred,
        demands.world,
        tuple(file_names.ranks(files.sizes())),
        _missing_files(files, demands.model),
        _missing_files(files, demands.resume),
        tuple(notes),
        len(files.sizes()),
        sum(files.sizes().values()),
        Corrupt.exit_code if Corrupt.exit_code in codes else codes[0],
    )


def _missing_files(files: Files, demanded: dict[str, int | None]) -> tuple[str, ...]:
    """Return demanded names that are not stored, then names with both sizes where these differ."""
    sizes = files.sizes()
    absent = [name for name in sorted(demanded) if name not in sizes]
    resized = [
        f"{name} ({sizes[name]} bytes, expected {size})"
        for name, size in sorted(demanded.items())
        if name in sizes and size is not None and sizes[name] != size
    ]
    return (*absent, *resized)


def _inspect_source(
    files: Files, source: WeightsSource, locations: Sequence[FileTree]
) -> InspectedSource:
    """Return one source of weights: its tensors, and whether it can be merged.

    A merge is planned to the last byte, which reads as `prepare` does.  Its error, unless
    StoreError, is in the result.
    """
    state, detail, code, tensors, writes = "complete", "", 0, tuple[Tensor, ...](), ""
    try:
        tensors = registry.tensors(files, source)
        job = prepare(files, MergeOptions("keep", source=str(source)))
        check_one_save(locations, job)
        writes = "adapter" if job.is_adapter else "model"
        detail = "; ".join(note for note in job.notes if note.startswith(DOUBT))
    except (Incomplete, Corrupt, Unsupported) as e:
        state, detail, code = type(e).__name__.lower(), str(e), e.exit_code
    described = tuple(
        InspectedTensor(
            tensor.name,
            tensor.dtype,
            tuple(tensor.shape),
            tuple(sorted({copy.dtype for copy in tensor.copies})),
            tensor.tied,
        )
        for tensor in tensors
    )
    return InspectedSource(str(source), state, detail, code, writes, described)
