"""Plan the merge of adapters into their base: a merge of the base whose tensors are summed.

Base and adapters are opened as every checkpoint is.  What an adapter changes is decided by
`adapter_changes`, and summed while the base is written.
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

        Raises Corrupt where a shape is not the one that was decided.
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
            own, left = self.tensors[name], list(step)
            while whole := next((c for c in left if isinstance(c, Replacement)), None):
                # what is replaced is not read
                left = left[left.index(whole) + 1 :]
                own = replace(own, shape=whole.tensor.shape, copies=whole.tensor.copies)
                self.steps[name] = []
            self.tensors[name] = own
            self.steps.setdefault(name, []).append(tuple(left))
        for name, shape in changed.shapes.items():
            if self.tensors[name].shape != shape:
                raise Corrupt(f"{name}: {self.tensors[name].shape}, {shape} expected")


def open_into_base(
    request: MergeRequest, access: Access, *, use_times: bool = True
) -> PreparedMerge:
    """Open the base and every adapter, and plan the merge.

    Raises ConfigError, Incomplete, Unsupported, Corrupt or StoreError.
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
    adapters = [(show_path(one.request.sources[0]), one.job) for one in opened]
    files = join_files(base.files, [adapter.files for adapter in opened])
    job = plan_sums(base.job, adapters, files, options, is_changed_base=request.is_changed_base)
    return PreparedMerge(
        request, job, files, (*base.trees, *(tree for one in opened for tree in one.trees))
    )


def open_base(request: MergeRequest, access: Access, *, use_times: bool = True) -> PreparedMerge:
    """Open the base that a request names, as a merge of it alone.

    Raises ConfigError, Incomplete, Unsupported, Corrupt or StoreError.
    """
    assert request.into is not None
    size = request.options.max_shard_size or _ONE_FILE
    options = replace(request.options, source=None, max_shard_size=size)
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
    """Return the job of the base with what adapters change, each with a name for messages.

    ``files``: see `join_files`.  Raises Incomplete, Unsupported or Corrupt.
    """
    heads = {plan.name: plan for plan in base.plans if plan.name == VALUE_HEAD}
    planned = [t for plan in base.plans if plan.name != VALUE_HEAD for t in plan.tensors]
    config = _config(base, CONFIG)
    model = _Model({t.name: _tensor(t, t.copy) for t in planned})
    sources = [base.source]
    for number, (shown, job) in enumerate(adapters):
        prefix = _prefix(number)
        own = [t for plan in job.plans if plan.name == f"{STEM}.safetensors" for t in plan.tensors]
        if not own:
            raise Unsupported(
                f"{shown}: a model, a LoRA adapter is expected",
                hint="a whole model needs no base: `ckptsync merge SRC DST`",
            )
        adapter_config = _config(job, ADAPTER_CONFIG)
        if adapter_config is None:
            raise Unsupported(
                f"{shown}: no adapter_config.json, and nothing else has the scale (lora_alpha)",
                hint="copy it there, or give its directory with --config-from (head.config_from)",
            )
        its_changes = plan_changes(
            list(model.tensors.values()),
            _updated(config, model.config),
            [_tensor(t, add_prefix(t.copy, prefix)) for t in own],
            adapter_config,
            is_changed_base=is_changed_base,
            is_equal=partial(_is_equal, files),
        )
        model.apply(its_changes)
        for plan in job.plans:
            if plan.name == VALUE_HEAD:
                tensors = (replace(t, copy=add_prefix(t.copy, prefix)) for t in plan.tensors)
                heads[VALUE_HEAD] = replace(plan, tensors=tuple(tensors))
        model.notes += [note for note in job.notes if note not in base.notes]
        sources.append(f"{shown} {job.source}")
    beside = _beside(base, adapters)
    contents = {
        name: job.contents[name]
        for name, (_, job) in beside.items()
        if name in job.contents  # searched for code, or made here
    }
    if model.config:
        changed = _updated(_config(base, CONFIG), model.config)
        contents[CONFIG] = (json.dumps(changed, indent=2) + "\n").encode()
    taken = [name for name, (_, job) in beside.items() if job is not base]
    notes = [f"from the adapter: {', '.join(taken)}"] if taken else []
    return replace(
        base,
        source=" + ".join(sources),
        plans=(*_plans(base, planned, model, options), *heads.values()),
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


def _plans(
    base: MergeJob, planned: Sequence[PlannedTensor], model: _Model, options: MergeOptions
) -> tuple[FilePlan, ...]:
    """Return the output files: cut as the base's, or by the size that the user gave."""
    dtypes = {t.name: t.dtype for t in planned}
    usual = Counter(filter(is_castable, dtypes.values())).most_common(1)
    items = []
    for name, tensor in model.tensors.items():
        own = tensor.dtype if not (usual and is_castable(tensor.dtype)) else usual[0][0]
        items.append((tensor, tensor.copies[0], dtypes.get(name, own)))
    holders = _holders(base, planned)
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


def _holders(base: MergeJob, planned: Sequence[PlannedTensor]) -> dict[str, str]:
    """Return the file of the base that each tensor lies in; empty unless named as usual."""
    if WeightsSource.named(base.source.partition("@")[0]).layout != "whole":
        return {}
    files = {t.name: {part.extent.file for part in t.copy.parts} for t in planned if t.copy.parts}
    names = {name: min(its).rpartition("/")[2] for name, its in files.items()}
    is_usual = all(map(_FILE.fullmatch, names.values())) and all(
        len(i) == 1 for i in files.values()
    )
    return names if is_usual else {}


def _beside(
    base: MergeJob, adapters: Sequence[tuple[str, MergeJob]]
) -> dict[str, tuple[Files, MergeJob]]:
    """Return the files beside the weights, and whose they are; the configuration comes last.

    The tokenizer and the chat template are the last adapter's that has them: those of the training.
    """
    beside = {name: (holder, base) for name, holder in base.beside}
    own = (ADAPTER_CONFIG, CONFIG, _GENERATION, VERL_LORA)
    for _, job in adapters:
        its = {
            name: (holder, job)
            for name, holder in job.beside
            if name not in own and not is_code(name)
        }
        if _VOCABULARIES & its.keys():
            beside = {n: at for n, at in beside.items() if not n.startswith(_OF_TOKENIZER)}
        tokenizer = _config(job, "tokenizer_config.json") or {}
        if "chat_template" in tokenizer or its.keys() & set(_TEMPLATES):
            beside = {n: at for n, at in beside.items() if n not in _TEMPLATES}
        beside |= its
    return {name: beside[name] for name in sorted(beside, key=lambda name: (name == CONFIG, name))}


def _prefix(number: int) -> str:
    return f"adapter {number + 1}/"


def _tensor(planned: PlannedTensor, copy: Copy) -> Tensor:
    return Tensor(planned.name, copy.dtype, planned.shape, (copy,))


def _config(job: MergeJob, name: str) -> dict[str, Any] | None:
    """Return a file beside the weights; None without one.  Raises Corrupt."""
    if name not in dict(job.beside):
        return None
    content = parse_file(name, job.content(name))
    return content if isinstance(content, dict) else None


def _updated(config: Mapping[str, Any] | None, change: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a copy of a configuration with the values of ``change``; None without one."""
    if config is None:
        return None
    copied: dict[str, Any] = json.loads(json.dumps(config))
    _update(copied, change)
    return copied


def _update(config: dict[str, Any], change: Mapping[str, Any]) -> None:
    """Set the values of ``change`` in a configuration, nested as there."""
    for key, value in change.items():
        if isinstance(value, Mapping) and isinstance(config.get(key, {}), dict):
            _update(config.setdefault(key, {}), value)
        else:
            config[key] = value


def _is_equal(files: Files, one: Tensor, other: Tensor, is_transposed: bool) -> bool:  # noqa: FBT001
    """Return whether two stored matrices have the same elements, see `IsEqual`."""
    if one.shape != (other.shape[::-1] if is_transposed else other.shape):
        return False
    its = read_floats(files, other.copies[0]).reshape(other.shape)
    own = read_floats(files, one.copies[0]).reshape(one.shape)
    return bool(np.array_equal(own, its.T if is_transposed else its))
