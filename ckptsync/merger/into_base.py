"""Plan the merge of LoRA adapters into their base model, whose files are written with the sums.

A user who serves one model needs no adapter beside it.  The base and each adapter are planned as a
merge of their own; `adapter_changes` decides what becomes of the base's tensors, and the base's job
then names those changes as `MergeJob.sums`, which are computed while the base is written.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from ckptsync.errors import Corrupt, Unsupported
from ckptsync.formats.dtypes import is_castable
from ckptsync.layouts.registry import WeightsSource
from ckptsync.merger.adapter import STEM
from ckptsync.merger.adapter_changes import plan_changes
from ckptsync.merger.adapter_sums import TensorSum, read_floats
from ckptsync.merger.change_types import Change, Changes, Replacement
from ckptsync.merger.inputs import MergeRequest, PreparedMerge, open_sources, show_path
from ckptsync.merger.joined_files import JoinedFiles, add_prefix
from ckptsync.merger.model_files import (
    ADAPTER_CONFIG,
    CONFIG,
    VALUE_HEAD,
    VERL_LORA,
    is_code,
    parse_file,
)
from ckptsync.merger.plan import (
    SHARD_SIZE,
    FilePlan,
    MergeOptions,
    PlannedTensor,
    file_plan,
    group_tensors,
    name_files,
)
from ckptsync.merger.prepare import MergeJob
from ckptsync.stores.opening import Access
from ckptsync.tensors import Copy, Files, Tensor

AS_BASE = 0
"""The ``max_shard_size`` of a merge whose files are cut as the base's are."""
_ONE_FILE = 1 << 62
_FILE = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")
_GENERATION = "generation_config.json"
_VOCABULARIES = frozenset(
    ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
)
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_OF_TOKENIZER = (
    *("tokenizer", "special_tokens_map", "added_tokens", "vocab", "merges", "spiece"),
    *("sentencepiece", "normalizer", "bpe", "source.spm", "target.spm"),
)


@dataclass(slots=True)
class _Model:
    """The model as it becomes with one adapter after another."""

    tensors: dict[str, Tensor]
    steps: dict[str, list[tuple[Change, ...]]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    modules: int = 0

    def apply(self, changed: Changes) -> None:
        """Apply what an adapter changes: to tensors, their steps, the configuration and the notes.

        Raises Corrupt if a shape is not the one that was decided.
        """
        self.modules += changed.modules
        self.notes += (*changed.notes, *(f"warning: {text}" for text in changed.warnings))
        _update(self.config, changed.config)
        for name in changed.removed:
            del self.tensors[name]
            self.steps.pop(name, None)
        for tensor in changed.added:
            self.tensors[tensor.name] = tensor
            self.steps.setdefault(tensor.name, [])
        for name, step in changed.of.items():
            tensor, remaining = self.tensors[name], list(step)
            while whole := next((c for c in remaining if isinstance(c, Replacement)), None):
                # what is replaced is not read
                remaining = remaining[remaining.index(whole) + 1 :]
                tensor = replace(tensor, shape=whole.tensor.shape, copies=whole.tensor.copies)
                self.steps[name] = []
            self.tensors[name] = tensor
            self.steps.setdefault(name, []).append(tuple(remaining))
        for name, shape in changed.shapes.items():
            if self.tensors[name].shape != shape:
                raise Corrupt(f"{name}: {self.tensors[name].shape}, {shape} expected")


def open_into_base(
    request: MergeRequest, access: Access, *, use_times: bool = True
) -> PreparedMerge:
    """Open the base and every adapter that the request names, and return the planned merge.

    ``use_times``: see `open_sources`.  Raises ConfigError, Incomplete, Unsupported, Corrupt or
    StoreError.
    """
    options = request.options
    base = open_base(request, access, use_times=use_times)
    opened = [
        open_sources(
            replace(
                request,
                sources=[source],
                options=MergeOptions("keep", _ONE_FILE, options.source, options.allow_code),
                into=None,
            ),
            access,
            use_times=use_times,
        )
        for source in request.sources
    ]
    adapters = [
        (show_path(opened_adapter.request.sources[0]), opened_adapter.job)
        for opened_adapter in opened
    ]
    files = join_files(base.files, [adapter.files for adapter in opened])
    job = plan_sums(base.job, adapters, files, options, is_changed_base=request.is_changed_base)
    return PreparedMerge(
        request,
        job,
        files,
        (*base.trees, *(tree for opened_adapter in opened for tree in opened_adapter.trees)),
    )


def open_base(request: MergeRequest, access: Access, *, use_times: bool = True) -> PreparedMerge:
    """Open the base that a request names, and return the merge of it alone.

    Raises Unsupported if it is an adapter, and what `open_sources` raises.
    """
    assert request.into is not None
    options = replace(request.options, source=None)
    base = open_sources(
        replace(request, sources=[request.into], options=options, into=None),
        access,
        use_times=use_times,
    )
    if base.job.is_adapter:
        raise Unsupported(
            f"{show_path(request.into)}: an adapter, its base is expected",
            hint="give the model that the adapter was trained on",
        )
    return base


def join_files(base: Files, adapters: Sequence[Files]) -> JoinedFiles:
    """Return the files of a base and its adapters under the names that `plan_sums` reads."""
    return JoinedFiles(base, {_prefix(number): files for number, files in enumerate(adapters)})


def plan_sums(
    base: MergeJob,
    adapters: Sequence[tuple[str, MergeJob]],
    files: Files,
    options: MergeOptions,
    *,
    is_changed_base: bool = False,
) -> MergeJob:
    """Return the job of the base with what adapters change.

    Args:
        base: The merge of the base alone.
        adapters: Each with its name in messages; their changes are applied in this order.
        files: Of base and adapters, see `join_files`.
        options: What is written.
        is_changed_base: See `plan_changes`.

    Raises:
        Incomplete: An adapter lacks a factor.
        Unsupported: A job is no LoRA adapter, or the base is quantised.
        Corrupt: An adapter does not fit the base.

    """
    heads = {plan.name: plan for plan in base.plans if plan.name == VALUE_HEAD}
    planned = [t for plan in base.plans if plan.name != VALUE_HEAD for t in plan.tensors]
    config = _read_config(base, CONFIG)
    model = _Model({t.name: _as_tensor(t, t.copy) for t in planned})
    for number, (label, job) in enumerate(adapters):
        prefix = _prefix(number)
        tensors, adapter_config = _read_adapter(label, job, prefix)
        changes = plan_changes(
            list(model.tensors.values()),
            _copy_updated(config, model.config),
            tensors,
            adapter_config,
            is_changed_base=is_changed_base,
            is_equal=partial(_is_equal, files),
        )
        model.apply(changes)
        for plan in job.plans:
            if plan.name == VALUE_HEAD:
                copied = (replace(t, copy=add_prefix(t.copy, prefix)) for t in plan.tensors)
                heads[VALUE_HEAD] = replace(plan, tensors=tuple(copied))
        model.notes += [note for note in job.notes if note not in base.notes]
    beside = _choose_beside(base, adapters)
    contents = {
        name: job.contents[name]
        for name, (_, job) in beside.items()
        if name in job.contents  # searched for code, or made here
    }
    if model.config:
        changed_config = _copy_updated(config, model.config)
        contents[CONFIG] = (json.dumps(changed_config, indent=2) + "\n").encode()
    from_adapters = [name for name, (_, job) in beside.items() if job is not base]
    notes = [f"from the adapter: {', '.join(from_adapters)}"] if from_adapters else []
    return replace(
        base,
        source=" + ".join((base.source, *(f"{label} {job.source}" for label, job in adapters))),
        plans=(*_cut_files(base, planned, model, options), *heads.values()),
        beside=tuple((name, holder) for name, (holder, _) in beside.items()),
        contents=contents,
        notes=(*base.notes, *notes, *model.notes),
        sums={
            name: TensorSum(model.tensors[name], tuple(steps))
            for name, steps in model.steps.items()
            if steps
        },
        modules=model.modules,
    )


def _read_adapter(label: str, job: MergeJob, prefix: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the tensors of an adapter's job and its configuration.

    ``label``: its name in messages; ``prefix``: that of its files.  Raises Unsupported if the job
    is no adapter's, or has no ``adapter_config.json``.
    """
    planned = [t for plan in job.plans if plan.name == f"{STEM}.safetensors" for t in plan.tensors]
    if not planned:
        raise Unsupported(
            f"{label}: a model, a LoRA adapter is expected",
            hint="a whole model needs no base: `ckptsync merge SRC DST`",
        )
    config = _read_config(job, ADAPTER_CONFIG)
    if config is None:
        raise Unsupported(
            f"{label}: no adapter_config.json, and nothing else has the scale (lora_alpha)",
            hint="copy it there, or give its directory with --config-from (head.config_from)",
        )
    return [_as_tensor(t, add_prefix(t.copy, prefix)) for t in planned], config


def _cut_files(
    base: MergeJob, planned: Sequence[PlannedTensor], model: _Model, options: MergeOptions
) -> tuple[FilePlan, ...]:
    """Return the output files: cut as the base's are, or by `MergeOptions.max_shard_size`.

    By `SHARD_SIZE` if `_base_files` is empty.  New tensors go to the last file, in the usual dtype.
    """
    dtypes = {t.name: t.dtype for t in planned}
    usual = Counter(filter(is_castable, dtypes.values())).most_common(1)
    items = []
    for name, tensor in model.tensors.items():
        dtype = tensor.dtype if not (usual and is_castable(tensor.dtype)) else usual[0][0]
        items.append((tensor, tensor.copies[0], dtypes.get(name, dtype)))
    holders = _base_files(base, planned)
    if options.max_shard_size or not holders:
        return name_files(group_tensors(items, options.max_shard_size or SHARD_SIZE), "model")
    starts = {t.name: t.copy.parts[0].extent.start for t in planned if t.copy.parts}
    files: dict[str, list[tuple[Tensor, Copy, str]]] = {
        name: [] for name in sorted({*holders.values()})
    }
    last = [*files][-1]
    for item in items:
        files[holders.get(item[0].name, last)].append(item)
    return tuple(
        file_plan(name, sorted(group, key=lambda item: starts.get(item[0].name, _ONE_FILE)))
        for name, group in files.items()
    )


def _base_files(base: MergeJob, planned: Sequence[PlannedTensor]) -> dict[str, str]:
    """Return, by tensor, the last component of the base's file that holds it.

    {} if the base is no whole model, a file has an unusual name, or a tensor lies in two files.
    """
    if WeightsSource.named(base.source.partition("@")[0]).layout != "whole":
        return {}
    files = {t.name: {part.extent.file for part in t.copy.parts} for t in planned if t.copy.parts}
    names = {name: min(holding_files).rpartition("/")[2] for name, holding_files in files.items()}
    is_usual = all(map(_FILE.fullmatch, names.values())) and all(
        len(holding_files) == 1 for holding_files in files.values()
    )
    return names if is_usual else {}


def _choose_beside(
    base: MergeJob, adapters: Sequence[tuple[str, MergeJob]]
) -> dict[str, tuple[Files, MergeJob]]:
    """Return the files beside the weights, and whose they are; the configuration comes last.

    Of an adapter all are taken but code and configurations of models.  One with a vocabulary
    replaces all files of the tokenizer, one with a chat template all templates.  The last one wins.
    """
    beside = {name: (holder, base) for name, holder in base.beside}
    models_own = (ADAPTER_CONFIG, CONFIG, _GENERATION, VERL_LORA)
    for _, job in adapters:
        of_adapter = {
            name: (holder, job)
            for name, holder in job.beside
            if name not in models_own and not is_code(name)
        }
        if _VOCABULARIES & of_adapter.keys():
            beside = {
                n: holder_and_job
                for n, holder_and_job in beside.items()
                if not n.startswith(_OF_TOKENIZER)
            }
        tokenizer = _read_config(job, "tokenizer_config.json") or {}
        if "chat_template" in tokenizer or of_adapter.keys() & set(_TEMPLATES):
            beside = {
                n: holder_and_job for n, holder_and_job in beside.items() if n not in _TEMPLATES
            }
        beside |= of_adapter
    return {name: beside[name] for name in sorted(beside, key=lambda name: (name == CONFIG, name))}


def _prefix(number: int) -> str:
    """Return what stands before the file names of the adapter with this index."""
    return f"adapter {number + 1}/"


def _as_tensor(planned: PlannedTensor, copy: Copy) -> Tensor:
    """Return a planned tensor with one copy as a tensor of a checkpoint."""
    return Tensor(planned.name, copy.dtype, planned.shape, (copy,))


def _read_config(job: MergeJob, name: str) -> dict[str, Any] | None:
    """Return a JSON object beside the weights; None without one.  Raises Corrupt if no JSON."""
    if name not in dict(job.beside):
        return None
    content = parse_file(name, job.content(name))
    return content if isinstance(content, dict) else None


def _copy_updated(
    config: Mapping[str, Any] | None, change: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return a deep copy of a configuration with the values of ``change``; None without one."""
    if config is None:
        return None
    copied: dict[str, Any] = json.loads(json.dumps(config))
    _update(copied, change)
    return copied


def _update(config: dict[str, Any], change: Mapping[str, Any]) -> None:
    """Set the values of ``change`` in ``config`` itself, nested as there."""
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(config.get(key, {}), dict):
            _update(config.setdefault(key, {}), value)
        else:
            config[key] = value


def _is_equal(files: Files, first: Tensor, second: Tensor, is_transposed: bool) -> bool:  # noqa: FBT001
    """Return whether two stored matrices are equal as float32, see `IsEqual`; read both."""
    second_values = read_floats(files, second.copies[0]).reshape(second.shape)
    first_values = read_floats(files, first.copies[0]).reshape(first.shape)
    return bool(np.array_equal(first_values, second_values.T if is_transposed else second_values))
