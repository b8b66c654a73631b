"""Plan a merge before its first byte is written: tensors, their names, files, what is beside them.

A merge that cannot succeed should write nothing.  So everything that decides it is read and checked
here: the layout's metadata, the configuration, a base model's headers, samples of redundant copies.
`prepare` returns a `MergeJob`, which says where each byte of the output comes from.  Pure but for
small reads.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.gc_pause import paused
from ckptsync.layouts import registry
from ckptsync.layouts.file_names import HOMES, Within, join
from ckptsync.layouts.registry import WeightsSource
from ckptsync.layouts.zero import WITHOUT_FROZEN
from ckptsync.merger import (
    adapter,
    completeness,
    model_files,
    model_prefix,
    non_model_tensors,
    tensor_names,
)
from ckptsync.merger.adapter import EACH, Selected, SeveralAdapters
from ckptsync.merger.joined_files import FILL, add_prefix
from ckptsync.merger.model_files import ADAPTER_CONFIG, CONFIG
from ckptsync.merger.model_prefix import InnerModel
from ckptsync.merger.plan import FilePlan, MergeOptions, plan
from ckptsync.plain_json import parse
from ckptsync.tensors import Checksum, Files, MemoryFiles, Tensor, read_whole

if TYPE_CHECKING:
    from ckptsync.layouts.dcp_safetensors import ExpectedModel
    from ckptsync.merger.adapter_sums import TensorSum
    from ckptsync.merger.base_comparison import BaseModel
    from ckptsync.merger.name_mapping import FileModel

MAX_BESIDE = 256 << 20
MAX_CONFIG = 16 << 20
_MOST_GROUPS = 6  # of filled tensors that a note names
_EVERY_ADAPTER = f"peft:{EACH}"


@dataclass(frozen=True, slots=True)
class MergeJob:
    """Everything that is known before the first byte is written.

    ``beside``: the files beside the weights and where they come from.  ``contents``: the bytes of
    those that were read already, as they are written: what was searched for code is not read a
    second time, when it may be something else. ``left_out``: code in the checkpoint that is not
    written, a file's name or ``config.json: auto_map``. ``code``: names of those of ``beside`` that
    bring code from the directory that the user named. ``filled``: names of tensors that are of the
    model of ``fill_from``.  ``sums``: by name, the tensors that adapters change; ``modules``: how
    many modules they adapt.
    """

    source: str
    plans: tuple[FilePlan, ...]
    beside: tuple[tuple[str, Files], ...]
    notes: tuple[str, ...]
    contents: Mapping[str, bytes] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    code: frozenset[str] = frozenset()
    filled: tuple[str, ...] = ()
    sums: Mapping[str, TensorSum] = field(default_factory=dict)
    modules: int = 0

    def content(self, name: str) -> bytes:
        """Return the bytes of a file of ``beside`` as they are written.

        Raises Corrupt if it is larger than `MAX_BESIDE`, and what its `Files` raise.
        """
        return (
            self.contents[name]
            if name in self.contents
            else read_whole(dict(self.beside)[name], name, MAX_BESIDE)
        )

    @property
    def size(self) -> int:
        """Bytes of weights to write."""
        return sum(p.size for p in self.plans)

    @property
    def is_adapter(self) -> bool:
        """Whether a PEFT adapter is written, not a model."""
        return any(
            plan.name.rpartition("/")[2] == f"{adapter.STEM}.safetensors" for plan in self.plans
        )

    @property
    def checksums(self) -> frozenset[Checksum]:
        """The checksums that the containers have of the records that are read."""
        of_sums = (tensor_sum.checksums for tensor_sum in self.sums.values())
        return frozenset[Checksum]().union(*(plan.checksums for plan in self.plans), *of_sums)

    @property
    def reads(self) -> frozenset[str]:
        """The source files whose tensor bytes are read."""
        return frozenset(
            part.extent.file for p in self.plans for t in p.tensors for part in t.copy.stored()
        )


@paused()
def prepare(
    files: Files,
    options: MergeOptions,
    config: Sequence[Files] = (),
    base: Files | None = None,
    code_from: Files | None = None,
    *,
    every: bool = False,
    fill_from: Files | None = None,
    names_of: Files | None = None,
) -> MergeJob:
    """Return the job of a merge that can be done; read metadata, copies' samples, tied tensors.

    Several adapters make one job (see `_join_jobs`) if ``every``, or if the source names all.  If
    the source that was chosen is damaged and the user named none, the error's hint names shards
    that can be merged.  The garbage collector is paused meanwhile.

    Args:
        files: The checkpoint.
        options: What is written.
        config: Further directories for configuration and tokenizer; the first that has a file wins.
        base: The model to compare with.
        code_from: The one of these directories from which code is copied, also without
            ``options.allow_code``.
        every: Where ``options.source`` names none of several adapters, plan all, each in the
            directory of its name.
        fill_from: The model whose tensors stand for those that the checkpoint does not hold.
        names_of: The model under whose names all is written.

    Raises:
        Incomplete: Files or tensors are missing.
        Corrupt: Files are damaged, or contradict each other.
        Unsupported: ckptsync does not know the format, or the user must choose a source
            (SeveralAdapters: an adapter).

    """
    name, path = model_prefix.split_source(options.source)
    name, part = adapter.split_source(name)

    models = _Models(
        _read_base(base, "--base") if base else None,
        _read_model(fill_from, "--fill-from"),
        _read_model(names_of, "--names-of"),
        tuple(directory for directory in (base, names_of, fill_from) if directory),
    )

    def plan_one(source: WeightsSource, part: str) -> MergeJob:
        """Return the job of one source, or of one part of it."""
        return _prepare_one(
            files, source, (path, part), options, config=config, models=models, code_from=code_from
        )

    if name == _EVERY_ADAPTER or (every and name is None and not part):
        adapters = registry.adapters(files)
        if len(adapters) > 1 or name == _EVERY_ADAPTER:
            sources_by_directory = {
                ("" if s.root in HOMES else s.root.rpartition("/")[2]): s for s in adapters
            }
            return _join_jobs(
                _EVERY_ADAPTER, {n: plan_one(s, part) for n, s in sources_by_directory.items()}
            )
    source = registry.choose(files, name)
    every_adapter = f"adapter={EACH}"
    try:
        job = plan_one(source, "" if part == every_adapter else part)
    except SeveralAdapters as e:
        if part != every_adapter and not every:
            raise
        jobs = {("" if n == "default" else n): plan_one(source, f"adapter={n}") for n in e.names}
        return _join_jobs(_source_name(source, path, every_adapter), jobs)
    except (Corrupt, Incomplete) as e:
        shards = _find_sound_shards(files, plan_one) if name is None and source.is_whole else None
        if shards is None:
            raise
        hint = f"the shards beside it can be merged: --source {shlex.quote(str(shards))}"
        raise type(e)(str(e), hint=f"{hint}; or {e.hint}" if e.hint else hint) from e
    unwritten_sources = [
        s for s in registry.adapters(files) if s != source and source.layout == "peft"
    ]
    left_out = [
        f"left out: the adapter {unwritten}; --source {shlex.quote(str(unwritten))} writes it"
        for unwritten in unwritten_sources
    ]
    return replace(job, notes=(*job.notes, *left_out))


def _find_sound_shards(
    files: Files, plan_one: Callable[[WeightsSource, str], MergeJob]
) -> WeightsSource | None:
    """Return the first sharded source for which ``plan_one`` raises no CkptsyncError, else None."""
    for source in registry.sources(files):
        if not source.is_whole:
            with contextlib.suppress(CkptsyncError):
                plan_one(source, "")
                return source
    return None


def _join_jobs(source: str, jobs: Mapping[str, MergeJob]) -> MergeJob:
    """Return one job for several adapters, each in the directory of its name, as peft saves them.

    ``jobs``: by directory.  Weights and ``adapter_config.json`` are each job's, notes and what is
    left out those of all, everything else the first's.  Raises Unsupported if there are none.
    """
    if not jobs:
        raise Unsupported(f"source {source!r}: no PEFT adapter has files of its own here")
    contents: dict[str, bytes] = {}
    for directory, job in jobs.items():
        for name, _ in job.beside:
            if name == ADAPTER_CONFIG:
                contents[join(directory, name)] = job.content(name)
    first, configurations = next(iter(jobs.values())), MemoryFiles(contents)
    shared = [(name, holder) for name, holder in first.beside if name != ADAPTER_CONFIG]
    return replace(
        first,
        source=source,
        plans=tuple(
            replace(plan, name=join(directory, plan.name))
            for directory, job in jobs.items()
            for plan in job.plans
        ),
        beside=(*shared, *((name, configurations) for name in contents)),
        notes=tuple(dict.fromkeys(note for job in jobs.values() for note in job.notes)),
        contents={**first.contents, **contents},
        left_out=tuple(sorted({name for job in jobs.values() for name in job.left_out})),
    )


@dataclass(frozen=True, slots=True)
class _FilesOfModel:
    """Tensors of a model's files, and its configuration: empty where there is none."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any]

    def relation(self, checkpoint: Iterable[Tensor]) -> FileModel:
        """Return where a checkpoint's tensors are in the files; raises Unsupported, Corrupt."""
        from ckptsync.merger.name_mapping import FileModel  # noqa: PLC0415 - few merges need it

        return FileModel(self.tensors, self.config, {t.name: t for t in checkpoint})


@dataclass(frozen=True, slots=True)
class _Models:
    """The models that a merge is compared with, filled from, and named after."""

    base: BaseModel | None
    fill: _FilesOfModel | None
    names: _FilesOfModel | None
    directories: tuple[Files, ...]


def _read_model(files: Files | None, option: str) -> _FilesOfModel | None:
    """Return the model in ``files``; None if ``files`` is None.  Raises as `_read_base`."""
    if files is None:
        return None
    return _FilesOfModel(_read_base(files, option).tensors, _read_config([files], CONFIG) or {})


@dataclass(frozen=True, slots=True)
class _Selection:
    """Which of a source's tensors are written: what the user named, and what files say of it.

    ``path``: of the model in the training's module; None if it is to be found.  ``part``: as
    `adapter.split_source` returns it.  ``config``, ``adapter_config``: None without such a file.
    """

    path: str | None
    part: str
    base_names: Collection[str]
    config: Mapping[str, Any] | None
    adapter_config: Mapping[str, Any] | None

    def find_path(self, names: Sequence[str]) -> str:
        """Return what `model_prefix.find_path` returns, but "" for None; raises the same."""
        prefix = model_prefix.find_path(
            names, self.path, self.base_names, self.config, self.adapter_config
        )
        return prefix or ""

    def inner_model(self, tensors: Sequence[Tensor]) -> InnerModel:
        """Return the model among a source's tensors: without wrappers and prefix.

        Without a ``path``, optimizer states and averages are left out, too.  Raises Unsupported
        where names do not say which model is meant, or two tensors would get one name.
        """
        model_tensors, notes_on_states = (
            (tensors, ()) if self.path else non_model_tensors.drop_states(tensors)
        )
        clean, notes_on_wrappers = tensor_names.strip_wrappers(model_tensors, self.base_names)
        inner = model_prefix.find_inner_model(
            clean, self.path, self.base_names, self.config, self.adapter_config
        )
        return replace(inner, notes=(*notes_on_states, *notes_on_wrappers, *inner.notes))

    def select(self, tensors: Sequence[Tensor]) -> tuple[Selected, InnerModel]:
        """Return what of a source's tensors is written, and the model that it was selected from.

        Raises SeveralAdapters or Unsupported.
        """
        inner = self.inner_model(tensors)
        return adapter.select(inner.tensors, self.part, self.adapter_config), inner

    def select_from(
        self, source: WeightsSource, tensors: Sequence[Tensor]
    ) -> tuple[Selected, InnerModel]:
        """Return what `select` does; of a ``peft`` source without ``part``, all of its tensors.

        Raises as `select`.
        """
        if source.layout != "peft" or self.part:
            return self.select(tensors)
        inner = self.inner_model(tensors)
        return Selected(inner.tensors, ""), inner


def _prepare_one(
    files: Files,
    source: WeightsSource,
    parts: tuple[str | None, str],
    options: MergeOptions,
    *,
    config: Sequence[Files],
    models: _Models,
    code_from: Files | None,
) -> MergeJob:
    """Return the job for one source, or for the parts of it that the user named.

    The value head is a file of its own.  Reads metadata, samples of copies, and all bytes of
    tensors that ``config.json`` ties.

    Args:
        files: The checkpoint.
        source: The weights in it that are written.
        parts: ``path`` and ``part`` of `_Selection`.
        options: What is written.
        config: Further directories with configuration.
        models: What the merge is compared with, filled from and named after.
        code_from: The directory whose code is copied.

    Raises:
        Incomplete: Tensors or files are missing.
        Corrupt: Files contradict each other, or one ends before its tensors do.
        Unsupported: The source is no whole model or adapter, or several could be meant.

    """
    directories = [*_config_directories(files, source), *config]
    adapter_config = _read_config(directories, ADAPTER_CONFIG)
    directories += models.directories
    base_names = models.base.tensors if models.base else {}
    model_config = _read_config(directories, CONFIG)
    selection = _Selection(*parts, base_names, model_config, adapter_config)
    stored = _read_tensors(files, source, selection, directories[1:], models.base)
    selected, inner = selection.select_from(source, stored)
    if selected.adapter and join(selected.adapter, ADAPTER_CONFIG) in files.sizes():
        # peft saves an adapter that is not called default in a directory of its name
        directories.insert(0, Within(files, selected.adapter))
        adapter_config = _read_config(directories, ADAPTER_CONFIG)
        selection = replace(selection, adapter_config=adapter_config)
        selected, inner = selection.select_from(source, stored)
    if inner.value_head and not selected.tensors:
        raise Unsupported(
            f"{source}: only a value head, without its model",
            hint="TRL's value head model saves no more in its state dict with an adapter: merge"
            " what save_pretrained wrote",
        )
    remarks = dict.fromkeys(t.remark for t in stored if t.remark)
    notes = [*(r for r in remarks if not models.fill or WITHOUT_FROZEN not in r), *inner.notes]
    if inner.path is None and model_config and _is_in_doubt(source, selected):
        notes.append(model_prefix.IN_DOUBT)
    notes += _check_copies(files, source, (*selected.tensors, *inner.value_head), selection)
    notes += selected.notes
    if selected.adapter is None and source.layout != "peft":
        beside = _plan_beside(directories, options, code_from, is_adapter=False)
        is_silent = registry.is_silent_on_missing(files, source)
        job = _prepare_model(selected.tensors, files, options, models, beside, is_silent=is_silent)
    else:
        beside = _plan_beside(directories, options, code_from, is_adapter=True)
        beside = _add_verl_config(beside, directories, selected)
        job = _prepare_adapter(selected, options, models, beside)
    if not job.plans:
        raise Unsupported(
            f"{source}: a model without tensors",
            hint="check that this is the checkpoint's directory and that the model was saved",
        )
    job = _add_value_head(job, files, source, inner.value_head, options)
    _check_bounds(files, job.plans)
    notes += non_model_tensors.notes_on_files(files, source, job.reads)
    return replace(job, source=_source_name(source, *parts), notes=(*notes, *job.notes))


def _read_tensors(
    files: Files,
    source: WeightsSource,
    selection: _Selection,
    directories: Sequence[Files],
    base: BaseModel | None,
) -> tuple[Tensor, ...]:
    """Return the tensors of a source; raises what its layout raises.

    The shards of ``dcp_safetensors`` do not name their tensors' shapes: these come from the base
    model and the first ``config.json`` in ``directories``.
    """
    if source.layout != "dcp_safetensors":
        return registry.tensors(files, source)
    expected = _expected_model(directories, base)
    return registry.tensors(files, source, replace(expected, path=selection.find_path))


def _is_in_doubt(source: WeightsSource, selected: Selected) -> bool:
    """Return whether a model's names may begin with the path of a training's module.

    True for Lightning's checkpoints, and for names that `model_prefix.is_in_doubt`; never for an
    adapter.
    """
    return selected.adapter is None and (
        source.layout == "lightning" or model_prefix.is_in_doubt([t.name for t in selected.tensors])
    )


def _source_name(source: WeightsSource, path: str | None, part: str) -> str:
    """Return what ``--source`` takes for a part of a source."""
    return "@".join((str(source), *filter(None, (path and f"module={path}", part))))


def _config_directories(files: Files, source: WeightsSource) -> list[Files]:
    """Return the directories that may have the configuration, in the order of preference.

    An adapter's own directory is the first, then the checkpoint, then those of `registry.around`.
    """
    adapter_directory = (
        [Within(files, source.root)] if source.layout == "peft" and source.root else []
    )
    return [*adapter_directory, files, *registry.around(files, source)]


def check_complete(files: Files) -> tuple[str, ...]:
    """Return doubts whether the preferred weights, or all adapters, are whole; () without doubts.

    Raises Incomplete where they are not; and what `registry.tensors` and `adapter.select` raise.
    Reads metadata, no tensor bytes.
    """
    sources = registry.adapters(files) or (registry.choose(files, None),)
    doubts: list[str] = []
    for source in sources:
        name = f"{source}: " if len(sources) > 1 else ""
        try:
            doubts += [f"{name}{doubt}" for doubt in _check_source(files, source)]
        except Incomplete as e:
            raise Incomplete(f"{name}{e}", hint=e.hint) from e
    return tuple(doubts)


def _check_source(files: Files, source: WeightsSource) -> tuple[str, ...]:
    """Return doubts whether one source is a whole model or adapter; raises as `check_complete`."""
    directories = _config_directories(files, source)
    adapter_config, model_config = (
        _read_config(directories, name) for name in (ADAPTER_CONFIG, CONFIG)
    )
    stored_weights, _ = non_model_tensors.drop_states(registry.tensors(files, source))
    clean, _ = tensor_names.strip_wrappers(stored_weights)
    inner = model_prefix.find_inner_model(clean, None, (), model_config, adapter_config)
    if source.layout == "peft":
        return completeness.check_adapter(inner.tensors, adapter_config)
    selected = adapter.select(inner.tensors, "", adapter_config)
    if selected.adapter is not None:
        return completeness.check_adapter(selected.tensors, adapter_config)
    return completeness.check_model(selected.tensors, model_config)


def prepare_beside(
    files: Files,
    options: MergeOptions,
    config: Sequence[Files],
    dtypes: Iterable[str],
    code_from: Files | None = None,
) -> MergeJob:
    """Return what stands beside a model that is made already, without reading a shard.

    ``options.source``: what it was made of; ``dtypes``: of its tensors; the rest as in `prepare`.
    Raises Corrupt as `_plan_beside`.
    """
    around = registry.around(files, WeightsSource.named((options.source or "").partition("@")[0]))
    job = _plan_beside([files, *around, *config], options, code_from, is_adapter=False)
    return _set_config_dtype(job, dtypes, options)


def _check_copies(
    files: Files, source: WeightsSource, tensors: Iterable[Tensor], selection: _Selection
) -> Iterator[str]:
    """Yield notes on sources of the same save that cannot be merged, and so not be compared.

    The copies are read and compared after the last note: iterate to the end.  Raises Corrupt, or
    Unsupported, as `copy_consistency.check_copies`, if two differ, in this source or another one.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    for second_source in registry.beside(files, source):
        try:
            selected, inner = selection.select(registry.tensors(files, second_source))
        except (Corrupt, Incomplete, Unsupported) as e:
            yield f"not compared with {second_source}, which cannot be merged: {e}"
            continue
        for second in (*selected.tensors, *inner.value_head):
            first = by_name.get(second.name)
            if first and (first.shape, first.dtype) == (second.shape, second.dtype):
                unlike = first.unlike or second.unlike
                copies = (*first.copies, *second.copies)
                by_name[second.name] = replace(first, copies=copies, unlike=unlike)
    from ckptsync.merger import copy_consistency  # noqa: PLC0415 - the worker loads no numpy

    copy_consistency.check_copies(files, by_name.values())


def _read_value_head(files: Files, source: WeightsSource) -> tuple[tuple[Tensor, ...], str]:
    """Return the value head in a file of its own, and the file's name; ``((), "")`` without one.

    It is looked for in the source's root and the directory above.  LLaMA-Factory writes
    ``value_head.safetensors``, or of old ``value_head.bin``; TRL wrote ``pytorch_model.bin`` beside
    an adapter.  Raises as `registry.file_tensors`, for any file of such a name.
    """
    names = [model_files.VALUE_HEAD, "value_head.bin"]
    names += ["pytorch_model.bin"] if source.layout == "peft" else []
    for root in dict.fromkeys((source.root, source.root.rpartition("/")[0])):
        for name in (join(root, name) for name in names):
            if name not in files.sizes():
                continue
            tensors = registry.file_tensors(files, name)
            if model_prefix.is_value_head([t.name for t in tensors]):
                return tensors, name
    return (), ""


def _add_value_head(
    job: MergeJob,
    files: Files,
    source: WeightsSource,
    value_head: Sequence[Tensor],
    options: MergeOptions,
) -> MergeJob:
    """Return the job with a file of the value head: ``value_head``, else one beside the source.

    Unchanged if there is none.  Raises as `_read_value_head` and `plan`.
    """
    origin, tensors = "the same shards", tuple(value_head)
    if not tensors:
        tensors, origin = _read_value_head(files, source)
    if not tensors:
        return job
    name = model_files.VALUE_HEAD
    plans = plan(tensors, replace(options, max_shard_size=1 << 62), name.partition(".")[0])
    note = f"{name}: the value head ({', '.join(t.name for t in tensors)}), from {origin}"
    return replace(job, plans=(*job.plans, *plans), notes=(note, *job.notes))


def _read_base(files: Files, option: str) -> BaseModel:
    """Return the model in ``files``.

    Raises Unsupported, Incomplete or Corrupt, with ``option`` in the message.
    """
    from ckptsync.merger import base_comparison  # noqa: PLC0415 - few merges have a base model

    return base_comparison.read_base(files, option)


def _expected_model(directories: Sequence[Files], base: BaseModel | None) -> ExpectedModel:
    """Return the base's shapes and packed types, and the first ``config.json`` of ``directories``.

    They stand in for shapes that a checkpoint does not name.  Raises Corrupt if that file has more
    than `MAX_BESIDE` bytes.
    """
    from ckptsync.layouts.dcp_safetensors import ExpectedModel  # noqa: PLC0415 - as its layout

    directory = next((directory for directory in directories if CONFIG in directory.sizes()), None)
    config = read_whole(directory, CONFIG, MAX_BESIDE) if directory else None
    if base is None:
        return ExpectedModel(config=config)
    return ExpectedModel(base.shapes(), config, base.packed())


def _prepare_model(
    stored: Sequence[Tensor],
    files: Files,
    options: MergeOptions,
    models: _Models,
    beside: MergeJob,
    *,
    is_silent: bool,
) -> MergeJob:
    """Return the job of a model, whose tensors are ``stored`` in the checkpoint.

    ``beside``: the job without weights.  ``is_silent``: a lost file of the source could have taken
    names with it, and its metadata would not say so.

    Raises Unsupported if ``options.dtype`` would cast bitsandbytes' packed weights; Incomplete,
    Corrupt or Unsupported as `_written_tensors`, `BaseModel.compare` and `plan`.
    """
    config = _read_config(
        [directory for name, directory in beside.beside if name == CONFIG], CONFIG
    )
    # bitsandbytes keeps packed 4-bit weights in any dtype, floats too: no cast may touch them
    packed = [
        t.name for t in stored if t.name.endswith((".absmax", ".SCB")) or ".quant_state." in t.name
    ]
    if packed and options.dtype not in ("auto", "keep"):
        raise Unsupported(
            f"{packed[0]}: quantized weights cannot be cast to {options.dtype}",
            hint="use --dtype auto or --dtype keep to copy them unchanged",
        )
    tensors, notes, doubts = _written_tensors(
        stored, files, options, models, config, is_silent=is_silent
    )
    base = models.base
    if base:
        compared = tensors if models.names else stored
        notes = (*notes, *_compare_with_base(base, tensors, compared, stored, config))
        tensors = base.with_dtypes(tensors) if options.dtype == "auto" else tensors
    plans = plan(tensors, options)
    of_model = model_files.notes_on_model(tensors, config, options.dtype, has_base=base is not None)
    notes = (*doubts, *notes, *of_model, *beside.notes)
    filled = tuple(t.name for t in tensors if models.fill and _is_filled(t))
    return _set_config_dtype(
        replace(beside, plans=plans, notes=notes, filled=filled),
        (t.dtype for p in plans for t in p.tensors),
        options,
    )


def _written_tensors(
    stored: Sequence[Tensor],
    files: Files,
    options: MergeOptions,
    models: _Models,
    config: Mapping[str, Any] | None,
    *,
    is_silent: bool,
) -> tuple[tuple[Tensor, ...], tuple[str, ...], tuple[str, ...]]:
    """Return the tensors of a model as they are written, notes, and doubts whether it is whole.

    Tied tensors, whose bytes are read, are written once.  What the checkpoint lacks is filled in,
    and all is renamed, if models are given for that.  ``is_silent``: see `_prepare_model`.

    Raises Incomplete if tensors are missing, Unsupported or Corrupt if a given model does not fit.
    """
    base_tensors = models.base.tensors if models.base else None
    tying_config = config
    if model := models.names or models.fill:
        from ckptsync.merger import name_mapping  # noqa: PLC0415 - few merges need it

        base_tensors = name_mapping.tensors_in_memory(model.tensors, model.config)
        if base_tensors and not tensor_names.has_head(base_tensors):
            # as the given files do, whatever the sections say
            tying_config = {"tie_word_embeddings": True}
    tensors, notes = tensor_names.drop_tied(stored, files, options, tying_config, base_tensors)
    if models.fill:
        written_count, stored_names = len(tensors), {t.name for t in stored}
        tensors = _fill(tensors, stored_names, models.fill, config, is_silent=is_silent)
        notes = (*notes, _note_on_filled(tensors[:written_count], tensors[written_count:]))
        doubts = completeness.check_model(tensors, config)
    else:
        doubts = completeness.check_model(stored, config)
    if models.names:
        relation = models.names.relation(tensors)
        tensors = relation.in_memory(tensors)
        tied = _tied_names({t.name for t in tensors}, relation.live, config)
        tensors = relation.under_file_names(tensors, tied)
        notes = (*notes, f"names are those of the given model's {len(relation.tensors)} tensors")
    return tensors, notes, doubts


def _compare_with_base(
    base: BaseModel,
    tensors: Sequence[Tensor],
    compared: Sequence[Tensor],
    stored: Sequence[Tensor],
    config: Mapping[str, Any] | None,
) -> tuple[str, ...]:
    """Return the notes of `BaseModel.compare`, whose errors are raised; tied tensors may be absent.

    Args:
        base: The base model.
        tensors: Those that are written.
        compared: Those whose names the base model's are related to.
        stored: Those of the checkpoint, under its own names.
        config: The ``config.json`` that is written; None without one.

    """
    names = {t.name for t in tensors}
    # names that the written model, or the base, need not have: another of a tied pair stands for
    # them
    tied = {t.name for t in stored} - names
    base_names = base.beside({t.name: t for t in compared}).keys()
    if config and tensor_names.is_tied(config):
        pairs = [*tensor_names.tied_pairs({*base_names, *names})]
        tied |= {second for second, first in pairs if first in base_names or first in names}
        tied |= {first for second, first in pairs if second in base_names} - base_names
    return base.compare(tensors, tied)


def _tied_names(
    names: Collection[str], more_names: Iterable[str], config: Mapping[str, Any] | None
) -> set[str]:
    """Return names that need not be stored: the configuration ties them to one of ``names``.

    Empty if it ties nothing. ``more_names``: further names that a pair may be completed by.
    """
    if not config or not tensor_names.is_tied(config):
        return set()
    pairs = [*tensor_names.tied_pairs({*names, *more_names})]
    return {a for pair in pairs for a, b in (pair, pair[::-1]) if b in names and a not in names}


def _fill(
    checkpoint: Sequence[Tensor],
    stored: Collection[str],
    model: _FilesOfModel,
    config: Mapping[str, Any] | None,
    *,
    is_silent: bool,
) -> tuple[Tensor, ...]:
    """Return a checkpoint's tensors, and after them those that only the model's files have.

    ``stored``: all names that the checkpoint has. Raises Unsupported if the names are neither the
    files' nor those in memory, or if the configurations differ in structure; Incomplete if
    something is filled and ``is_silent``: then the missing tensors may have been saved, and lost.
    """
    relation = model.relation(checkpoint)
    in_memory = relation.in_memory(checkpoint)
    if in_memory != tuple(checkpoint):
        raise Unsupported(
            f"the checkpoint's names, such as {checkpoint[0].name}, are neither those of the given"
            " files, nor those in memory",
            hint="merge it with --names-of alone, then that model with --fill-from",
        )
    tied = _tied_names({t.name for t in checkpoint}, relation.live, config) | set(stored)
    filled = tuple(map(_prefix_fill, relation.missing(checkpoint, tied)))
    if filled:
        from ckptsync.merger.name_mapping import check_same_structure  # noqa: PLC0415 - as above

        check_same_structure(config or {}, model.config, (t.name for t in filled))
    if filled and is_silent:
        raise Incomplete(
            f"{len(filled)} tensors, such as {filled[0].name}, are not in the checkpoint, and its"
            " metadata does not say whether they were saved: --fill-from takes only what was not",
            hint="give the directories of all nodes; or save the model with an index or .metadata",
        )
    return (*checkpoint, *filled)


def _prefix_fill(tensor: Tensor) -> Tensor:
    """Return a tensor of the filling model, its files under `FILL` and untied."""
    return replace(tensor, copies=tuple(add_prefix(c, FILL) for c in tensor.copies), tied=None)


def _is_filled(tensor: Tensor) -> bool:
    """Return whether a tensor is of the model that ``--fill-from`` names."""
    return any(part.extent.file.startswith(FILL) for copy in tensor.copies for part in copy.parts)


def _note_on_filled(of_checkpoint: Sequence[Tensor], filled: Sequence[Tensor]) -> str:
    """Return a note on how many tensors are filled, 0 too, and on the modules with most of them."""
    total = len(of_checkpoint) + len(filled)
    if not filled:
        return f"--fill-from: nothing taken, the checkpoint holds all {total} tensors"
    groups = Counter(".".join(t.name.split(".")[:2]) for t in filled)
    group_counts = [f"{count} of {group}" for group, count in groups.most_common(_MOST_GROUPS)]
    more = ", …" if len(groups) > _MOST_GROUPS else ""
    return (
        f"--fill-from: {len(filled)} of {total} tensors are the given model's, since the checkpoint"
        f" does not hold them: {', '.join(group_counts)}{more}; {len(of_checkpoint)} are the"
        " checkpoint's"
    )


def _add_verl_config(
    beside: MergeJob, directories: Iterable[Files], selected: Selected
) -> MergeJob:
    """Return the job with ``adapter_config.json``, made of verl's rank and alpha, and a note.

    The same job if it has that file, or if there is no file of verl's SFT trainer with both.
    """
    if ADAPTER_CONFIG in dict(beside.beside):
        return beside
    verl_config = _read_config(directories, model_files.VERL_LORA)
    data = model_files.make_lora_config(verl_config or {}, [t.name for t in selected.tensors])
    if not data:
        return beside
    note = f"{ADAPTER_CONFIG} is made of {model_files.VERL_LORA} and the names of the tensors"
    return replace(
        beside,
        beside=(*beside.beside, (ADAPTER_CONFIG, MemoryFiles({ADAPTER_CONFIG: data}))),
        contents={**beside.contents, ADAPTER_CONFIG: data},
        notes=(*beside.notes, note),
    )


def _prepare_adapter(
    selected: Selected, options: MergeOptions, models: _Models, beside: MergeJob
) -> MergeJob:
    """Return the job of an adapter, which is one file of any size, since peft reads no more.

    Raises Unsupported if the user named a model to fill from or to take names of; Incomplete or
    Corrupt if the adapter is not whole, or fits neither its configuration nor the base model.
    """
    if models.fill or models.names:
        raise Unsupported(
            "an adapter; --fill-from and --names-of are for models",
            hint="merge the adapter without them; --source SOURCE@base is the model under it",
        )
    config = _read_config(
        [directory for name, directory in beside.beside if name == ADAPTER_CONFIG], ADAPTER_CONFIG
    )
    notes = completeness.check_adapter(selected.tensors, config)
    adapter.check_rank(selected, config or {})
    notes += models.base.compare_adapter(selected.tensors) if models.base else ()
    if config is None:
        notes = (*notes, model_files.NO_ADAPTER_CONFIG)
    plans = plan(selected.tensors, replace(options, max_shard_size=1 << 62), adapter.STEM)
    return replace(beside, plans=plans, notes=(*notes, *beside.notes))


def _plan_beside(
    directories: Sequence[Files],
    options: MergeOptions,
    code_from: Files | None,
    *,
    is_adapter: bool,
) -> MergeJob:
    """Return the job without weights: the files beside them.

    Each is of the first directory that has it.  Without ``options.allow_code``, code and keys that
    lead to code are only ``code_from``'s; ``left_out`` and a note name the others.  Such a key of
    another directory's file stays, with ``code_from``'s value, if its file has it at the top.  All
    configurations are read then: Corrupt if one is not JSON, or has more than `MAX_CONFIG` bytes.
    """
    holders: dict[str, Files] = {}
    left_out_code: set[str] = set()
    for directory in directories:
        for name in model_files.files_beside(directory.sizes(), adapter=is_adapter):
            if options.allow_code or directory is code_from or not model_files.is_code(name):
                holders.setdefault(name, directory)
            else:
                left_out_code.add(name)
    job = MergeJob(
        "",
        (),
        tuple(
            (name, holders[name]) for name in model_files.files_beside(holders, adapter=is_adapter)
        ),
        (),
    )
    if options.allow_code:
        return job
    left_out_code -= holders.keys()
    contents: dict[str, bytes] = {}
    code = {name for name in holders if model_files.is_code(name)}
    for name, directory in job.beside:
        if not model_files.is_configuration(name):
            continue
        contents[name] = config = read_whole(directory, name, MAX_CONFIG)
        keys = allowed = model_files.find_code(name, config)
        if directory is not code_from:
            # a key may stay where the user's own file has it at its top, with the value that it has
            # there
            users_keys = {}
            if code_from and name in code_from.sizes():
                users_keys = model_files.find_code(name, read_whole(code_from, name, MAX_CONFIG))
            allowed = {key: value for key, value in users_keys.items() if value is not None}
            contents[name] = model_files.strip_code(name, config, allowed)
            left_out_code |= {f"{name}: {key}" for key in keys if key not in allowed}
        if allowed.keys() & keys.keys():
            code.add(name)
    left_out = tuple(sorted(left_out_code))
    notes = model_files.notes_on_code(left_out)
    return replace(job, contents=contents, left_out=left_out, code=frozenset(code), notes=notes)


def _set_config_dtype(job: MergeJob, dtypes: Iterable[str], options: MergeOptions) -> MergeJob:
    """Return the job with ``config.json``, if it has one, read and naming the weights' dtype."""
    if CONFIG not in dict(job.beside):
        return job
    dtype = model_files.config_dtype(dtypes, options.dtype)
    return replace(
        job, contents={**job.contents, CONFIG: model_files.set_dtype(job.content(CONFIG), dtype)}
    )


def _read_config(directories: Iterable[Files], name: str) -> dict[str, Any] | None:
    """Return the first such file's content: None without one, {} if large or no JSON object."""
    directory = next((directory for directory in directories if name in directory.sizes()), None)
    if directory is None:
        return None
    try:
        content = parse(read_whole(directory, name, MAX_CONFIG), name)
    except Corrupt:
        return {}  # it is copied as it is; what it means is for its reader to say
    return content if isinstance(content, dict) else {}


def _check_bounds(files: Files, plans: Sequence[FilePlan]) -> None:
    """Raise Corrupt if a file, unless of ``--fill-from``, ends before a byte that will be read."""
    sizes = files.sizes()
    ends: dict[str, int] = {}
    for extent in (part.extent for p in plans for t in p.tensors for part in t.copy.stored()):
        if extent.file.startswith(FILL):
            continue  # a model's file, whose header was held against its size when it was read
        ends[extent.file] = max(ends.get(extent.file, 0), extent.start + extent.size)
    for name, end in ends.items():
        size = sizes.get(name, 0)
        if end > size:
            raise Corrupt(
                f"{name}: {size} bytes, at least {end} expected",
                hint="it is truncated: fetch it again",
            )
