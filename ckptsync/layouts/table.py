"""The table of layouts, and what can be known of any checkpoint without knowing which layout it has.

`sources` finds its sets of weights, `choose` takes one, `tensors` reads it; `demands` says which files there should be.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.formats import safetensors, torch_save
from ckptsync.layouts import dcp, dcp_safetensors, lightning, peft, per_rank, refused, universal, whole, whole_bin, zero
from ckptsync.layouts.names import Within, join
from ckptsync.layouts.rank_names import ranks
from ckptsync.layouts.shapes_proof import Outside
from ckptsync.model import Demands, Extent, Files, Tensor, expect, read, read_whole
from ckptsync.parsing import parse


class Layout(Protocol):
    """How one framework spreads tensors over files: a module with these names.  A new one goes in `LAYOUTS`.

    ``root`` is a directory of the checkpoint, ``""`` for itself; or, of sets of files side by side, what their names begin with.
    """

    NAME: str

    def roots(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the roots that have this layout, judged by names alone."""
        ...

    def holds_weights(self, root: str) -> bool:
        """Return False for a root of optimizer states only."""
        ...

    def demands(self, files: Files, root: str) -> dict[str, int | None]:
        """Return every file that the layout's own metadata needs, with its size where known; raises Incomplete without metadata."""
        ...

    def tensors(self, files: Files, root: str) -> tuple[Tensor, ...]:
        """Return the weights of a root whose demands are met. Raises Incomplete, Unsupported or Corrupt; reads no tensor bytes."""
        ...


LAYOUTS: dict[str, Layout] = {  # preferred first: whole weights win over shards
    "whole": whole,
    "peft": peft,
    "bin": whole_bin,
    "dcp_safetensors": dcp_safetensors,
    "dcp": dcp,
    "universal": universal,
    "zero": zero,
    "per_rank": per_rank,
    "lightning": lightning,
    "refused": refused,
}

# What they demand is in the very pickles that their tensors are read from, and not all of it is needed for every merge: they
# read each once, and name what is missing.
_CHECK_THEMSELVES = frozenset({zero.NAME, universal.NAME})

_LOOK = 128 << 10  # bytes at the beginning and the end of a file that mostly tell what is in it
_WHOLE = ("whole", "peft", "bin")
_TRAINER_STATE = "trainer_state.json"
_TRAINED = frozenset({_TRAINER_STATE, peft.CONFIG, whole.INDEX})
_RNG = re.compile(r"((?:checkpoint/)?(?:rng_state_|random_states_))[0-9]+(\.pth|\.pkl)")


@dataclass(frozen=True, slots=True)
class Source:
    """One set of weights in a checkpoint. ``str(source)`` is what ``--source`` takes: ``zero:global_step4``, ``whole:.``."""

    layout: str
    root: str

    def __str__(self) -> str:
        return f"{self.layout}:{self.root or '.'}"

    @classmethod
    def named(cls, text: str) -> Source:
        """Return the source of that text."""
        layout, _, root = text.partition(":")
        return cls(layout, "" if root == "." else root)


def sources(files: Files) -> tuple[Source, ...]:
    """Return every set of weights, the preferred one first; empty if this is no known checkpoint."""
    names = files.sizes()
    found = [Source(name, root) for name, layout in LAYOUTS.items() for root in layout.roots(names) if layout.holds_weights(root)]
    tag = zero.preferred(files, tuple(s.root for s in found if s.layout == zero.NAME))
    return tuple(sorted(found, key=lambda s: (_is_hollow(files, s), s.layout == zero.NAME and s.root != tag)))


def choose(files: Files, name: str | None) -> Source:
    """Return the source of that name, or the preferred one; raises Unsupported where there is none, or where it is not clear."""
    found = sources(files)
    if name is not None:
        chosen = [s for s in found if name in (str(s), s.layout, s.root)] or _section(found, name)
        if len(chosen) != 1:
            raise Unsupported(
                f"source {name!r}: {len(chosen)} of that name", hint=f"there are: {', '.join(map(str, found)) or 'none'}"
            )
        return chosen[0]
    if not found:
        raise no_weights(files)
    rivals = _rivals(files, found)
    if len(rivals) > 1:
        raise Unsupported(
            f"{len(rivals)} sets of weights, and nothing says which is meant", hint=f"--source {' or '.join(map(str, rivals))}"
        )
    return found[0]


def _section(found: Sequence[Source], name: str) -> list[Source]:
    """Return the source of ``dcp:x#ema``, a part of a distributed checkpoint; see ``tensors`` of its layouts."""
    whole, mark, section = name.rpartition("#")
    ours = [s for s in found if mark and s.layout in (dcp.NAME, dcp_safetensors.NAME) and whole in (str(s), s.layout, s.root)]
    return [Source(s.layout, f"{s.root or '.'}#{section}") for s in ours]


def no_weights(files: Files) -> CkptsyncError:
    """Return the error for files of no layout: a trainer's checkpoint lacks its weights (3), anything else is not known (5)."""
    names = files.sizes()
    if _TRAINED & names.keys() or any(map(_RNG.fullmatch, names)):
        return Incomplete(
            f"no weights among the {len(names)} files of this checkpoint",
            hint="model.safetensors, or the shards, are missing: fetch them from the node that wrote them",
        )
    return Unsupported(
        f"no known checkpoint among these {len(names)} files",
        hint=f"known layouts: {', '.join(name for name in LAYOUTS if name != refused.NAME)}; point at the checkpoint's directory",
    )


def _rivals(files: Files, found: Sequence[Source]) -> list[Source]:
    """Return the sets of weights that nothing ranks: whole ones win, and of DeepSpeed's tags the one that ``latest`` names."""
    if found[0].layout in _WHOLE:
        return [s for s in found if s.layout == found[0].layout]
    found = [s for s in found if not (s.layout == dcp.NAME and Source(dcp_safetensors.NAME, s.root) in found)]  # the optimizer's
    found = [s for s in found if s.layout != lightning.NAME] or found  # beside shards such a file is the script's own
    tag = zero.preferred(files, tuple(s.root for s in found if s.layout == zero.NAME))
    return [s for s in found if s.layout not in _WHOLE and not (s.layout == zero.NAME and tag is not None and s.root != tag)]


def beside(files: Files, source: Source) -> tuple[Source, ...]:
    """Return other sources that hold weights of the same save: of DeepSpeed's shards the whole model that the Trainer put above them, and back.

    Only where the step in ``trainer_state.json`` is that of DeepSpeed's tag: elsewhere the whole model may be of a later save.
    """
    home, _, folder = source.root.rpartition("/") if source.layout == zero.NAME else (source.root, "", "")
    tag = f"global_step{_step(files, home)}"
    if source.layout == zero.NAME and folder == tag:
        return tuple(s for s in sources(files) if s.layout in _WHOLE and s.root == home)
    if source.layout in _WHOLE:
        return tuple(s for s in sources(files) if s == Source(zero.NAME, join(home, tag)))
    return ()


def _step(files: Files, home: str) -> int | None:
    """Return the step of a checkpoint, as the Trainer wrote it."""
    name = join(home, _TRAINER_STATE)
    try:
        state = parse(read_whole(files, name), name) if name in files.sizes() else None
    except Corrupt:
        return None  # resuming fails on it; nothing else depends on it
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int else None


def tensors(files: Files, source: Source, outside: Outside | None = None) -> tuple[Tensor, ...]:
    """Return the weights of one source, once every file it demands is there with its size.

    ``outside``: what else is known of the model, for the layout that needs a proof from elsewhere.
    """
    if source.layout == dcp_safetensors.NAME:
        return dcp_safetensors.tensors(files, source.root, outside or Outside())
    layout = LAYOUTS[source.layout]
    expect(files, _heads_and_tails(files, source))
    if source.layout not in _CHECK_THEMSELVES:
        require(files, layout.demands(files, source.root))
    return layout.tensors(files, source.root)


def _heads_and_tails(files: Files, source: Source) -> Iterator[Extent]:
    """Yield where the containers of a source say what is in them: all that is read before its tensors are known, unless it is long."""
    for name, size in files.sizes().items():
        if not name.startswith(join(source.root, "")):
            continue
        if name.endswith((".pt", ".pth", ".bin")):
            yield Extent(name, max(0, size - _LOOK), min(size, _LOOK))
        if name.endswith((".pt", ".pth", ".bin", ".safetensors")) and size > _LOOK:
            yield Extent(name, 0, _LOOK)


def around(files: Files, source: Source) -> tuple[Files, ...]:
    """Return the directories of the checkpoint in which the framework keeps configuration and tokenizer of this source, the nearest first."""
    own = [per_rank.configuration(source.root)] if source.layout == per_rank.NAME else []
    parts = source.root.split("/")
    above = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return tuple(Within(files, home) for home in (*own, *above) if home)


def require(files: Files, needed: Mapping[str, int | None]) -> None:
    """Raise Incomplete if a file is missing (3: fetch it), Corrupt if one has another size (10: it was cut or rewritten)."""
    sizes = files.sizes()
    missing = sorted(name for name in needed if name not in sizes)
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise Incomplete(
            f"{missing[0]}{more}: not there, of {len(needed)} files that the checkpoint needs",
            hint="give the other nodes' directories too",
        )
    for name, size in needed.items():
        if size not in (None, sizes[name]):
            raise Corrupt(
                f"{name}: {sizes[name]} bytes, {size} expected by the metadata", hint="it was cut short, or belongs to another save"
            )


def demands(files: Files) -> Demands:
    """Return what the metadata here demands; nothing where this node's files have none. Raises Corrupt or Unsupported."""
    found = sources(files)
    model = _demands(files, found[0]) if found else {}
    others = [Source(name, root) for name, layout in LAYOUTS.items() for root in layout.roots(files.sizes())]
    resume = {k: v for source in others for k, v in _demands(files, source).items() if k not in model}
    world = _world(files, others, model)
    resume |= {name: files.sizes().get(name) for name in _random_states(files.sizes(), world)}
    return Demands(model, resume, world)


def closed(name: str, files: Files) -> bool:
    """Return whether a file has the end that its format gives it. True for formats that have none."""
    size = files.sizes()[name]
    try:
        if name.endswith(".safetensors"):
            return bool(safetensors.tensors(files, name)) or size > 8
        if name.endswith((".pt", ".pth", ".bin", ".ckpt")):
            where = Extent(name, 0, size)
            if torch_save.has_end(files, where, per_rank.ALLOWED):
                return True
            # what begins as neither container has no end that is known; a file cut short to nothing could become an archive
            return size >= 2 and read(files, Extent(name, 0, 2)) != b"PK" and not torch_save.is_legacy(files, where)
        if name.endswith(".json"):
            parse(read_whole(files, name), name)
    except Corrupt:
        return False
    except Unsupported:
        return True  # it is whole, and of elements that we do not merge
    return True


def _is_hollow(files: Files, source: Source) -> bool:
    """Return whether whole weights are empty placeholders of ZeRO-3 (LlamaFactory#1226, peft#2500): these do not win."""
    if source.layout not in _WHOLE:
        return False
    try:
        found = tensors(files, source)
    except (Incomplete, Corrupt, Unsupported):
        return False  # the same error comes when it is used
    return any(t.shape == (0,) for t in found)


def _demands(files: Files, source: Source) -> dict[str, int | None]:
    try:
        return LAYOUTS[source.layout].demands(files, source.root)
    except Incomplete:
        return {}  # another node has the metadata


def _world(files: Files, found: Iterable[Source], model: Iterable[str]) -> int | None:
    """Return the number of ranks as ZeRO records it, or by the names of the files that DCP's metadata refers to."""
    for source in found:
        if source.layout == zero.NAME and _demands(files, source):
            return zero.world(files, source.root)
    seen = ranks(model)
    return seen[-1] + 1 if seen else None


def _random_states(names: Iterable[str], world: int | None) -> list[str]:
    """Return the files of random states that every rank writes, if any rank here wrote one."""
    kinds = {(m[1], m[2]) for m in map(_RNG.fullmatch, names) if m}
    return [f"{stem}{rank}{end}" for stem, end in sorted(kinds) for rank in range(world or 0)]
