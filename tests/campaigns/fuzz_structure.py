"""Well-made checkpoints in which a name, number, shape, stride, type or order is another one, with
checksums that fit, judged by what torch makes of them.

What ckptsync merges has to be what torch itself reads (``torch.load`` with ``weights_only``, the
reader of distributed checkpoints, safetensors), or what DeepSpeed's ``zero_to_fp32`` would make of
ZeRO's files; and what torch refuses has to be refused.
"""

from __future__ import annotations

import io
import pickle
import random
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ckptsync.merger.plan import MergeOptions
from tests.campaigns.fuzz import Case, Door, Wrong
from tests.campaigns.fuzz_changes import NAMES, altered, odd
from tests.support import zero_writer
from tests.support.files_in_memory import write_files
from tests.support.merge_on_disk import merge_local
from tests.support.torch_bytes import raw, saved
from tests.support.vector import vector

Tensors = dict[str, torch.Tensor]
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float64,
    torch.complex64,
)
_DCP = (("dcp-mesh", "plain"), ("dcp-mesh", "wrapped"), ("titan", "checkpoint/step-2"),
    ("acc-fsdp2-bf16-tied", "out/checkpoints/checkpoint_0/pytorch_model_fsdp_0"))  # fmt: skip


def _tensor(dice: random.Random) -> torch.Tensor:
    """A view of any kind, of values that differ."""
    dtype, numel = dice.choice(_DTYPES), dice.choice((0, 1, 2, 12, 24, 60))
    base = (torch.arange(numel + 4) % 97).to(dtype)
    kind = dice.randrange(8)
    if kind == 0:
        return base[2 : 2 + numel]
    if kind == 1 and numel >= 12:
        return base[:numel].reshape(4, -1).t()
    if kind == 2 and numel >= 12:
        return base[:numel:2]
    if kind == 3:
        return base[:1].expand(dice.randrange(5))
    if kind == 4:
        return base[0]
    if kind == 5 and numel >= 12:
        return base.as_strided((2, 3), (dice.randrange(4), dice.randrange(4)), dice.randrange(3))
    if kind == 6:
        return torch.empty((dice.randrange(3), 0, 2), dtype=dtype)
    return base[:numel].clone().reshape(-1, dice.choice([n for n in (1, 2, 3) if numel % n == 0]))


def _other(value: Any, dice: random.Random) -> Any:
    """Return another value than one of a pickle's that has no parts."""
    if isinstance(value, torch.Tensor):
        return _other_tensor(value, dice)
    if isinstance(value, torch.dtype):
        return dice.choice(_DTYPES)
    if dice.randrange(3) == 0:
        return dice.choice((None, 0, "", [], {}, dice.choice(NAMES), torch.zeros(3)))
    return odd(value, dice)


def _other_tensor(value: torch.Tensor, dice: random.Random) -> Any:
    kind = dice.randrange(9)
    if kind == 0:
        return value.to(dice.choice(_DTYPES))
    if kind == 1:
        return value.reshape(-1)
    if kind == 2 and value.dim() == 2:
        return value.t()
    if kind == 3 and value.numel():
        return value.reshape(-1)[: dice.randrange(value.numel())]
    if kind == 4 and value.numel():
        return torch.cat([value.reshape(-1), value.reshape(-1)[: dice.randrange(1, 5)]])
    if kind == 5 and value.numel():
        return value.roll(1)
    if kind == 6:
        return value.unsqueeze(0)
    if kind == 7:
        return dice.choice((None, 0, "x", [value], (value, value)))
    return _tensor(dice)


# one file that torch.save wrote


def _make_bin(dice: random.Random) -> Case:
    state: Any = {f"layer.{n}.weight": _tensor(dice) for n in range(dice.randrange(1, 5))}
    if dice.randrange(3) == 0:
        state[dice.choice(NAMES)] = _tensor(dice)
    if dice.randrange(3) == 0:  # of one storage
        state["shared"] = state["layer.0.weight"].detach()
    if dice.randrange(4) == 0:
        state = altered(state, dice, _other)
    options = {"_use_new_zipfile_serialization": False} if dice.randrange(6) == 0 else {}
    return {"layout": "bin", "files": {"pytorch_model.bin": saved(state, **options)}}


def _read_bin(root: Path, _: Tensors) -> Tensors:
    state = torch.load(root / "pytorch_model.bin", map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise TypeError("no dictionary")
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


# safetensors


def _read_safetensors(root: Path, _: Tensors) -> Tensors:
    from safetensors.torch import load

    tensors: Tensors = load((root / "model.safetensors").read_bytes())
    return tensors


# ZeRO


def _make_zero(dice: random.Random) -> Case:
    counts = range(dice.randrange(2, 6))
    shapes = [tuple(dice.randrange(1, 5) for _ in range(dice.randrange(3))) for _ in counts]
    values = {f"p{n}": zero_writer.values(shape, 64 * n) for n, shape in enumerate(shapes)}
    groups = [{name: t for name, t in values.items() if int(name[1:]) % 2 == g} for g in range(2)]
    frozen = {"frozen": zero_writer.values((3, 2), 900, torch.bfloat16)}
    buffers = {"buffer": zero_writer.values((2,), 950)}
    save = zero_writer.Zero(
        dice.choice((2, 3)),
        dice.choice((1, 2, 3)),
        groups,
        frozen if dice.randrange(2) else {},
        buffers if dice.randrange(2) else {},
        {"tied": "p0"} if dice.randrange(3) == 0 else {},
        None,
        dice.choice((0, 3)),
    )
    files = dict(zero_writer.files(save).content)
    name = dice.choice(sorted(files))
    state = torch.load(io.BytesIO(files[name]), weights_only=False)  # of our own making
    files[name] = saved(altered(state, dice, _other))
    return {"layout": "zero", "files": files}


def _read_zero(root: Path, ours: Tensors) -> Tensors:
    """Read as DeepSpeed's ``zero_to_fp32.py`` does, in short (0.19.8)."""
    folder = root / "global_step2"
    models = [torch.load(p, weights_only=True) for p in sorted(folder.glob("*model_states.pt"))]
    optimizers = sorted(folder.glob("*optim_states.pt"))
    states = [torch.load(p, weights_only=True)["optimizer_state_dict"] for p in optimizers]
    # `BF16_Optimizer` writes no stage, and its states are as those of stage 1
    count, stage = states[0]["partition_count"], states[0].get("zero_stage", 1)
    world = max(count) if isinstance(count, list | tuple) else count
    if world != len(states):
        raise ValueError("as many files as ranks are expected")
    first, shapes = models[0], models[0]["param_shapes"]
    module = {n: value for n, value in first["module"].items() if isinstance(value, torch.Tensor)}
    buffers = [name for name in first.get("buffer_names") or () if isinstance(name, str)]
    tensors = {name: module[name] for name in buffers if name in module}
    frozen = first.get("frozen_param_shapes") or {}
    if stage == 3:
        for name, shape in frozen.items():
            parts = [m["frozen_param_fragments"][name].reshape(-1) for m in models]
            tensors[name] = torch.cat(parts, 0).narrow(0, 0, shape.numel()).view(shape)
        flat = [torch.cat(s["fp32_flat_groups"], 0) for s in states]
        offset = 0
        for name, shape in {k: v for group in shapes for k, v in group.items()}.items():
            each = -(-shape.numel() // world)
            whole = torch.cat([f.narrow(0, offset, each) for f in flat], 0)
            tensors[name] = whole.narrow(0, 0, shape.numel()).view(shape)
            offset += each
        if offset * world != flat[0].numel() * world:
            raise ValueError("numel is not what was consumed")
    else:
        fragments = first.get("frozen_param_fragments") or {}  # else the model file's copy
        parts_of_frozen = {name: fragments.get(name) for name in frozen}
        tensors |= {
            n: part for n, part in parts_of_frozen.items() if isinstance(part, torch.Tensor)
        }
        for n, group in enumerate(shapes):
            flat_group = torch.cat([s["single_partition_of_fp32_groups"][n] for s in states], 0)
            offset = 0
            for name, shape in group.items():
                tensors[name] = flat_group.narrow(0, offset, shape.numel()).view(shape)
                offset += shape.numel()
            align = 2 * world
            if -(-offset // align) != -(-flat_group.numel() // align):
                raise ValueError("numel is not what was consumed")
    for name, stored in dict(first.get("shared_params") or {}).items():
        if isinstance(stored, str) and stored in tensors:
            tensors[name] = tensors[stored]
    # of what is not trained the model file's copy
    copies = {name: t for name, t in module.items() if name in ours and t.numel()}
    return {name: tensor.float() for name, tensor in (copies | tensors).items()}


# distributed checkpoints


@cache
def _described(name: str, folder: str) -> tuple[Mapping[str, bytes], Any]:
    root = vector(name).keep.parent.parent / folder
    files = {p.name: p.read_bytes() for p in sorted(root.iterdir()) if p.suffix == ".distcp"}
    return files, (root / ".metadata").read_bytes()


def _make_dcp(dice: random.Random) -> Case:
    files, data = _described(*dice.choice(_DCP))
    meta = pickle.loads(data)
    files = dict(files)
    if dice.randrange(4):
        table = dice.choice(("state_dict_metadata", "storage_data", "planner_data"))
        setattr(meta, table, altered(getattr(meta, table), dice, _other))
    else:  # one item is another tensor, at the end of its file
        item = dice.choice([*meta.storage_data.values()])
        old = files[item.relative_path]
        tensor = torch.load(io.BytesIO(old[item.offset :][: item.length]), weights_only=True)
        if isinstance(tensor, torch.Tensor):
            data = saved(_other_tensor(tensor, dice))
            files[item.relative_path] = old + data
            item.offset, item.length = len(old), len(data)
    return {"layout": "dcp", "files": {**files, ".metadata": pickle.dumps(meta, 2)}}


def _read_dcp(root: Path, ours: Tensors) -> Tensors:
    """What torch loads of those that were merged; what no chunk covers is NaN."""
    from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    reader = FileSystemReader(root)
    torch.use_deterministic_algorithms(mode=True)  # fills what is empty
    described = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if isinstance(entry, TensorStorageMetadata) and any(_is_name_of(name, n) for n in ours)
    }
    _load_state_dict(state, reader, planner=DefaultLoadPlanner(), no_dist=True)
    return state


# all

BORNE = ('hasRecord("version")',)  # an archive without its version has the same tensors

READERS: Mapping[str, Callable[[Path, Tensors], Tensors]] = {
    "bin": _read_bin,
    "safetensors": _read_safetensors,
    "zero": _read_zero,
    "dcp": _read_dcp,
}
_MAKERS = (_make_bin, _make_bin, _make_zero, _make_zero, _make_dcp, _make_dcp)


def _make(dice: random.Random) -> Case:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dice.choice(_MAKERS)(dice)


def _run(case: Case, home: Path) -> str:
    root = write_files(home / "in", case["files"])
    merge_local([root], home / "out" / "new", MergeOptions("keep"))
    ours = _written(home / "out" / "new")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = READERS[case["layout"]](root, ours)
    except Exception as e:
        if any(words in str(e) for words in BORNE):
            return "not refused"
        says = f"{type(e).__name__}: {e}"[:500]
        raise Wrong(f"{case['layout']}: merged, where torch says {says}") from e
    _compare(ours, theirs, case["layout"])
    return f"{case['layout']} as torch's"


def _written(root: Path) -> Tensors:
    from safetensors.torch import load_file

    tensors: Tensors = {}
    for path in root.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def _compare(ours: Tensors, theirs: Tensors, layout: str) -> None:
    for name, tensor in ours.items():
        alike = [t for n, t in theirs.items() if _is_name_of(n, name)]
        if not alike:
            raise Wrong(f"{layout}: {name} is merged, torch knows only {sorted(theirs)[:8]}")
        if not any(_equal(tensor.float() if layout == "zero" else tensor, t) for t in alike):
            raise Wrong(f"{layout}: {name} is {_shown(tensor)}, torch reads {_shown(alike[0])}")
    left = sorted(name for name in theirs if not any(_is_name_of(name, n) for n in ours))
    if left:
        raise Wrong(f"{layout}: {left[:8]} are not merged")


def _is_name_of(theirs: str, ours: str) -> bool:
    return theirs == ours or theirs.endswith(f".{ours}")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def _shown(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.reshape(-1)[:6].tolist()}"


def _ready() -> None:
    torch.set_num_threads(1)
    for each in _DCP:
        _described(*each)


DOORS: Mapping[str, Door] = {"merge-structure": Door(_make, _run, ("in", "out"), _ready)}
