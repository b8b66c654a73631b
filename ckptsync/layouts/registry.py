"""The registry of layouts, and what can be known of a checkpoint of any layout.

A checkpoint can hold several sets of weights, such as a whole model beside shards. `sources` finds
them, `choose` takes one, and `tensors` returns where the tensors of one lie. `demands` says which
files there should be, so that the store knows when a checkpoint is complete. A layout's module is
imported only if files have its names (`LAYOUTS`).
"""

# ruff: noqa: PLC0415  a layout is imported when a checkpoint has files that are named like its own

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ckptsync.errors import CkptsyncError, Corrupt, Incomplete, Unsupported
from ckptsync.layouts.file_names import (
    HOMES,
    METADATA,
    MOST_RANKS,
    PICKLED_METADATA,
    Within,
    holds_weights,
    inside,
    is_of_optimizer,
    join,
    ranks,
    use_of,
)
from ckptsync.layouts.state_dict import without_extra_states
from ckptsync.plain_json import parse
from ckptsync.tensors import Demands, Extent, Files, Tensor, expect, read, read_whole

if TYPE_CHECKING:
    from ckptsync.layouts.dcp_safetensors import ExpectedModel


class Layout(Protocol):
    """How one framework spreads tensors over files: a module with these functions.

    ``root`` is a directory of the checkpoint, ``""`` for itself; or, of sets of files side by side,
    the beginning of their names.
    """

    def roots(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the roots that have this layout, judged by names alone."""
        ...

    def demands(self, files: Files, root: str) -> dict[str, int | None]:
        """Return every file that the layout's own metadata needs, with its size if known.

        Raise Incomplete without metadata.
        """
        ...

    def tensors(self, files: Files, root: str) -> tuple[Tensor, ...]:
        """Return the weights of a root whose demands are met, without reading their bytes.

        Raise Incomplete, Unsupported or Corrupt.
        """
        ...


@dataclass(frozen=True, slots=True)
class LayoutRow:
    """What is known of a layout before its module is imported: a row of `LAYOUTS`.

    ``files``: a checkpoint can have the layout only if the last component of a file's name matches.
    ``is_whole``: each file has whole weights, which are preferred to shards.
    """

    files: re.Pattern[str]
    is_whole: bool = False
    # `tensors` reads the pickles that `demands` would read, requires them, and does not need all
    # of them for every merge.
    checks_itself: bool = False
    has_sections: bool = False  # a root may end in ``#section``
    naming: str = ""  # the suffix of the files that alone say which tensor is where
    configuration: tuple[
        str, ...
    ] = ()  # names of directories beside a root that hold its configuration


# By the layouts' names, preferred first.
LAYOUTS: dict[str, LayoutRow] = {
    "whole": LayoutRow(re.compile(r"model.*\.safetensors.*"), is_whole=True),
    "peft": LayoutRow(re.compile(r"adapter_model\..*"), is_whole=True),
    "bin": LayoutRow(re.compile(r"pytorch_model.*\.bin.*"), is_whole=True),
    "dcp_safetensors": LayoutRow(re.compile(r"shard-.*\.safetensors"), has_sections=True),
    "dcp": LayoutRow(re.compile(r"\.metadata|__.*"), has_sections=True, naming=".metadata"),
    "universal": LayoutRow(re.compile(r"fp32\.pt"), checks_itself=True),
    "zero": LayoutRow(
        re.compile(r".*_states\.pt|expert_.*"),
        checks_itself=True,
        naming="_model_states.pt",
    ),
    "per_rank": LayoutRow(
        re.compile(r".*_rank_?[0-9]+\.(bin|pt)|metadata\.pkl"),
        configuration=("huggingface", "lora_adapter"),  # verl's: the model's, the adapter's
    ),
    "lightning": LayoutRow(re.compile(r".+\.ckpt")),
    "refused": LayoutRow(
        re.compile(r".*(optim_rng|model_rng|distrib_optim|rank-?[0-9]+-of-.*)\.(pt|pth|bin)"),
    ),
}


def layout(name: str) -> Layout:
    """Import and return the module of a layout; raise Unsupported for an unknown name."""
    match name:
        case "whole":
            from ckptsync.layouts import whole_safetensors

            return whole_safetensors
        case "peft":
            from ckptsync.layouts import peft

            return peft
        case "bin":
            from ckptsync.layouts import whole_bin

            return whole_bin
        case "dcp_safetensors":
            from ckptsync.layouts import dcp_safetensors

            return dcp_safetensors
        case "dcp":
            from ckptsync.layouts import dcp

            return dcp
        case "universal":
            from ckptsync.layouts import zero_universal

            return zero_universal
        case "zero":
            from ckptsync.layouts import zero

            return zero
        case "per_rank":
            from ckptsync.layouts import per_rank

            return per_rank
        case "lightning":
            from ckptsync.layouts import lightning

            return lightning
        case "refused":
            from ckptsync.layouts import known_unsupported

            return known_unsupported
    raise Unsupported(f"no layout is named {name!r}", hint=f"there are: {', '.join(LAYOUTS)}")


def _roots(names: Collection[str]) -> list[WeightsSource]:
    """Return every root of every layout as a source, also those of optimizer and other states."""
    bases = {name.rpartition("/")[2] for name in names}
    layouts = [
        layout_name for layout_name, row in LAYOUTS.items() if any(map(row.files.fullmatch, bases))
    ]
    return [
        WeightsSource(layout_name, root)
        for layout_name in layouts
        for root in layout(layout_name).roots(names)
    ]


_LOOK = 128 << 10  # bytes at the beginning and the end of a file: its description, mostly
_TRAINER_STATE = "trainer_state.json"
_LOOPS = "meta.pt"  # what Lightning's sharded checkpoint has beside the tensors
_TRAINED = frozenset({_TRAINER_STATE, "adapter_config.json", "model.safetensors.index.json"})
_CONFIG_HINT = "copy the adapter's configuration there: it has its scale, and no other file does"
_TORCH_SAVED = re.compile(
    r".*\.(pt|pth|bin|ckpt)|(.*/)?(random_states|custom_checkpoint)_[0-9]+\.pkl", re.DOTALL
)
_NUMBER = re.compile(r"[0-9]+")
_RNG = re.compile(
    r"((?:checkpoint/)?(?:rng_state_|random_states_)|rng_state/rank_)([0-9]+)(\.pth|\.pkl|\.pt)"
)


@dataclass(frozen=True, slots=True)
class WeightsSource:
    """One set of weights in a checkpoint.

    ``str(source)`` is what ``--source`` takes: ``zero:global_step4``, ``whole:.``.
    """

    layout: str
    root: str

    def __str__(self) -> str:
        return f"{self.layout}:{self.root or '.'}"

    @property
    def is_whole(self) -> bool:
        """Whether each file has whole weights."""
        return LAYOUTS[self.layout].is_whole

    def is_called(self, name: str) -> bool:
        """Return whether ``name`` is the source, its layout or its root."""
        return name in (str(self), self.layout, self.root)

    @classmethod
    def named(cls, text: str) -> WeightsSource:
        """Return the source whose ``str`` is ``text``."""
        layout, _, root = text.partition(":")
        return cls(layout, "" if root == "." else root)


def sources(files: Files) -> tuple[WeightsSource, ...]:
    """Return every set of weights, the preferred one first; () for an unknown checkpoint.

    If there are several, files are read: sets of empty placeholders come last, and so do
    DeepSpeed's tags other than the preferred one. A single one is returned unread.
    """
    weights_sources = [source for source in _roots(files.sizes()) if holds_weights(source.root)]
    if len(weights_sources) == 1:
        return tuple(weights_sources)  # no tensors need be read
    tag = _preferred_tag(files, weights_sources)
    return tuple(
        sorted(
            weights_sources,
            key=lambda s: (_is_hollow(files, s), s.layout == "zero" and s.root != tag),
        )
    )


def is_known(names: Collection[str]) -> bool:
    """Return whether names show a layout that is merged, or that a trainer wrote these files.

    Otherwise no file can say what is missing.
    """
    if _TRAINED & set(names) or any(map(_RNG.fullmatch, names)):
        return True
    bases = {name.rpartition("/")[2] for name in names}
    merged = (row.files for name, row in LAYOUTS.items() if name != "refused")
    return any(files.fullmatch(base) for files in merged for base in bases)


def _preferred_tag(files: Files, candidates: Sequence[WeightsSource]) -> str | None:
    """Return the only DeepSpeed tag, or of several the one that ``latest`` names, as a root.

    Return None if there is no such tag, or if tags are in the directories of several checkpoints,
    none of them at the top.
    """
    tags = tuple(s.root for s in candidates if s.layout == "zero")
    if len(tags) == 1:
        return tags[0]
    homes = {root.rpartition("/")[0] for root in tags}
    home = "" if "" in homes else min(homes, default="")
    pointer = join(home, "latest")
    if (len(homes) > 1 and home) or pointer not in files.sizes():
        return None
    root = join(home, read_whole(files, pointer, 4096).decode("utf-8", "replace").strip())
    return root if root in tags else None


def choose(files: Files, name: str | None) -> WeightsSource:
    """Return the source called ``name``, or without a name the preferred one.

    Raise Unsupported if not exactly one has the name, if several could be meant, or if the
    directory has several checkpoints. Raise the error of `no_weights` if there is none.
    """
    candidates = sources(files)
    if name is not None:
        chosen = _default([s for s in candidates if s.is_called(name)]) or _section(
            candidates, name
        )
        if len(chosen) != 1:
            raise Unsupported(
                f"source {name!r}: {len(chosen)} of that name",
                hint=f"there are: {', '.join(map(str, candidates)) or 'none'}",
            )
        return chosen[0]
    if not candidates:
        raise no_weights(files)
    rivals = _rivals(files, candidates)
    if len(rivals) > 1:
        names = [shlex.quote(str(source)) for source in rivals]
        each = "; --source 'peft:*' writes every one" if rivals[0].layout == "peft" else ""
        raise Unsupported(
            f"{len(rivals)} sets of weights in this checkpoint: choose one",
            hint=f"--source {' or '.join(names)}{each}",
        )
    if neighbours := _numbered_alike(files.sizes(), rivals[0]):
        raise Unsupported(
            f"{rivals[0]}: weights of other layouts are in {', '.join(neighbours)}",
            hint="give the directory of one checkpoint",
        )
    return rivals[0]


def adapters(files: Files) -> tuple[WeightsSource, ...]:
    """Return the PEFT adapters that have files of their own; none if others are preferred."""
    return _adapters(sources(files))


def _adapters(candidates: Sequence[WeightsSource]) -> tuple[WeightsSource, ...]:
    """Return the adapters among sources; none if the first is no adapter."""
    return tuple(s for s in candidates if s.layout == candidates[0].layout == "peft")


def _section(candidates: Sequence[WeightsSource], name: str) -> list[WeightsSource]:
    """Return the source that ``name`` calls as a section of another one (``dcp:x#ema``), if any."""
    source_name, hash_mark, section = name.rpartition("#")
    return [
        WeightsSource(s.layout, f"{s.root or '.'}#{section}")
        for s in candidates
        if hash_mark and LAYOUTS[s.layout].has_sections and s.is_called(source_name)
    ]


def no_weights(files: Files) -> CkptsyncError:
    """Return, not raise, the error that there are no weights.

    It is Unsupported, with their names, if checkpoints are in directories below; else Incomplete if
    a trainer wrote these files, else Unsupported.
    """
    names = files.sizes()
    if inner := inner_checkpoints(names):
        return Unsupported(
            f"no checkpoint, but {len(inner)} in directories of it: {', '.join(inner)}",
            hint="give the directory of one of them",
        )
    if _TRAINED & names.keys() or any(map(_RNG.fullmatch, names)):
        return Incomplete(
            f"no weights among the {len(names)} files of this checkpoint",
            hint=(
                "model.safetensors, or the shards, are missing: fetch them from the node that wrote"
                " them"
            ),
        )
    return Unsupported(
        f"no known checkpoint among these {len(names)} files",
        hint=f"known layouts: {', '.join([*LAYOUTS][:-1])}; point at the checkpoint's directory",
    )


def inner_checkpoints(names: Iterable[str]) -> list[str]:
    """Return the top directories that are checkpoints themselves, sorted, by their files' names."""
    inner: dict[str, list[str]] = {}
    for name in names:
        folder, _, inner_name = name.partition("/")
        inner.setdefault(folder, []).append(inner_name)
    return sorted(
        folder
        for folder, inner_names in inner.items()
        if holds_weights(folder)
        and any(inner_names)
        and any(holds_weights(source.root) for source in _roots([*filter(None, inner_names)]))
    )


def _numbered_alike(names: Collection[str], source: WeightsSource) -> list[str]:
    """Return the directories whose names differ from the source's by a number alone, sorted.

    They have weights, but none of the source's layout.

    For example ``checkpoint-2`` beside ``checkpoint-4``: an output directory, in which none is
    preferred.
    """
    top_directory = source.root.partition("/")[0]
    stem = _NUMBER.sub("", top_directory)
    neighbours = {
        folder: [name.partition("/")[2] for name in names if name.startswith(f"{folder}/")]
        for folder in {name.partition("/")[0] for name in names if "/" in name} - {top_directory}
        if stem != top_directory and _NUMBER.sub("", folder) == stem and holds_weights(folder)
    }
    layouts = {folder: {s.layout for s in _roots(inner)} for folder, inner in neighbours.items()}
    return sorted(
        folder
        for folder, names_of_layouts in layouts.items()
        if names_of_layouts and source.layout not in names_of_layouts
    )


def _default(candidates: Sequence[WeightsSource]) -> list[WeightsSource]:
    """Return the adapter called default if it is one of ``candidates``, else all of them."""
    return [s for s in candidates if s.layout == "peft" and s.root in HOMES] or [*candidates]


def _rivals(files: Files, candidates: Sequence[WeightsSource]) -> list[WeightsSource]:
    """Return the sources that neither wholeness nor ``latest`` decides between.

    One if it is clear.
    """
    if candidates[0].is_whole:
        return _default([s for s in candidates if s.layout == candidates[0].layout])
    # a DCP beside weights in safetensors is the optimizer's
    optimizers = [WeightsSource("dcp", s.root) for s in candidates if s.layout == "dcp_safetensors"]
    candidates = [s for s in candidates if s not in optimizers]
    # beside shards a .ckpt file is the script's own
    candidates = [s for s in candidates if s.layout != "lightning"] or candidates
    tag = _preferred_tag(files, candidates)
    return [
        s
        for s in candidates
        if not s.is_whole and not (s.layout == "zero" and tag is not None and s.root != tag)
    ]


def deepspeed_tags(files: Files, source: WeightsSource) -> tuple[str, tuple[str, ...]]:
    """Return DeepSpeed's tag in the checkpoint of ``source``, and its other tags, as roots.

    The tag is the source itself, or the only one, or the one that ``latest`` names; "" if there is
    none.
    """
    home = source.root if source.is_whole else source.root.rpartition("/")[0]
    tags = [
        s for s in _roots(files.sizes()) if s.layout == "zero" and s.root.rpartition("/")[0] == home
    ]
    tag = source.root if source in tags else _preferred_tag(files, tags) or ""
    return tag, tuple(s.root for s in tags if s.root != tag)


def beside(files: Files, source: WeightsSource) -> tuple[WeightsSource, ...]:
    """Return other sources that hold weights of the same save.

    For DeepSpeed's shards that is the whole model that the Trainer wrote above them, and the other
    way round. The step in ``trainer_state.json`` must be that of DeepSpeed's tag: otherwise the
    whole model may be of a later save.
    """
    if source.layout == "zero":
        home, _, tag = source.root.rpartition("/")
        if tag == f"global_step{_step(files, home)}":
            return tuple(s for s in sources(files) if s.is_whole and s.root == home)
    if source.is_whole:
        tag = join(source.root, f"global_step{_step(files, source.root)}")
        return tuple(s for s in sources(files) if s == WeightsSource("zero", tag))
    return ()


def _step(files: Files, home: str) -> int | None:
    """Return the step that the Trainer wrote into a directory, or None if it cannot be read."""
    name = join(home, _TRAINER_STATE)
    try:
        state = parse(read_whole(files, name), name) if name in files.sizes() else None
    except Corrupt:
        return None  # resuming fails on it; nothing else depends on it
    step = state.get("global_step") if isinstance(state, dict) else None
    return step if type(step) is int else None


def tensors(
    files: Files, source: WeightsSource, outside: ExpectedModel | None = None
) -> tuple[Tensor, ...]:
    """Return the weights of one source, after checking that every file it demands has its size.

    ``outside``: what else is known of the model, for the layout that needs a proof. Raise
    Incomplete, Corrupt or Unsupported.
    """
    if source.layout == "dcp_safetensors":
        from ckptsync.layouts import dcp_safetensors

        return without_extra_states(dcp_safetensors.tensors(files, source.root, outside))
    module = layout(source.layout)
    expect(files, _heads_and_tails(files, source))
    if not LAYOUTS[source.layout].checks_itself:
        require(files, module.demands(files, source.root))
    return without_extra_states(module.tensors(files, source.root))


def file_tensors(files: Files, name: str) -> tuple[Tensor, ...]:
    """Return the tensors of one file of whole tensors, in safetensors or of ``torch.save``.

    Raise Corrupt or Unsupported.
    """
    if name.endswith(".safetensors"):
        from ckptsync.formats import safetensors

        return safetensors.tensors(files, name)
    from ckptsync.layouts import whole_bin

    return whole_bin.file_tensors(files, name)


def _heads_and_tails(files: Files, source: WeightsSource) -> Iterator[Extent]:
    """Yield the ranges of a source's files that describe their content.

    They are announced together, so that distant files cost one round trip; a long description needs
    more reads.
    """
    for name, size in files.sizes().items():
        if not name.startswith(join(source.root, "")):
            continue
        if name.endswith((".pt", ".pth", ".bin")):
            yield Extent(name, max(0, size - _LOOK), min(size, _LOOK))
        if name.endswith((".pt", ".pth", ".bin", ".safetensors")) and size > _LOOK:
            yield Extent(name, 0, _LOOK)


def around(files: Files, source: WeightsSource) -> tuple[Files, ...]:
    """Return the directories that may hold a source's configuration and tokenizer.

    The nearest comes first.
    """
    parts, beside = source.root.split("/"), LAYOUTS[source.layout].configuration
    siblings = ["/".join([*parts[:-1], name]) for name in beside]
    above = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
    return tuple(Within(files, home) for home in (*siblings, *above) if home)


def require(files: Files, needed: Mapping[str, int | None]) -> None:
    """Raise Incomplete if a file is missing, Corrupt if one has another size.

    A missing file has not been fetched; a file of another size was truncated or rewritten. A size
    of None is not checked.
    """
    sizes = files.sizes()
    missing = sorted(name for name in needed if name not in sizes)
    if missing:
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise Incomplete(
            f"{missing[0]}{more}: not found, of {len(needed)} files that the checkpoint needs",
            hint=_CONFIG_HINT
            if missing[0].endswith("adapter_config.json")
            else "give the other nodes' directories too",
        )
    for name, size in needed.items():
        if size not in (None, sizes[name]):
            raise Corrupt(
                f"{name}: {sizes[name]} bytes, {size} expected by the metadata",
                hint="it is truncated, or belongs to another save",
            )


def demands(files: Files, sent: Collection[str] | None = None, ranks: int | None = None) -> Demands:
    """Return what the metadata in ``files`` demands; nothing if there is no metadata.

    ``sent``: the files that are stored, if not all are; without metadata only these are demanded
    for a resumed training. ``ranks``: how many wrote it, if the hook has said so; it counts only
    for random states beside a whole model. Raise Corrupt or Unsupported.
    """
    candidates = sources(files)
    needed = {source: _demands(files, source) for source in _roots(files.sizes())}
    every = _adapters(candidates) or candidates[:1]
    model = {k: v for source in every for k, v in needed[source].items()}
    resume = {k: v for each in needed.values() for k, v in each.items() if k not in model}
    world = writers = _world(files, needed, model)
    rng_matches = [m for m in map(_RNG.fullmatch, files.sizes()) if m]
    if (
        not resume
        and candidates
        and candidates[0].is_whole
        and (states := _states(files.sizes() if sent is None else sent))
    ):
        resume = dict.fromkeys(states)
        ranks_here = [rank for rank in (int(m[2]) for m in rng_matches) if rank < MOST_RANKS]
        writers = max([*ranks_here, (ranks or 0) - 1], default=-1) + 1 if world is None else world
    if not resume and every and model and _has_optimizer(files, every[0]):
        resume = dict(model)  # the same files have both
        loops = join(every[0].root, _LOOPS)
        resume |= {loops: files.sizes()[loops]} if loops in files.sizes() else {}
    # every rank writes a random state if any rank does
    kinds = {(m[1], m[3]) for m in rng_matches}
    random = [f"{stem}{rank}{end}" for stem, end in sorted(kinds) for rank in range(writers or 0)]
    return Demands(model, resume | {name: files.sizes().get(name) for name in random}, world)


def _has_optimizer(files: Files, source: WeightsSource) -> bool:
    """Return whether a source's files hold an optimizer's state, too: of dcp and lightning only."""
    from ckptsync.layouts import dcp, lightning

    if source.layout == "dcp":
        return dcp.has_optimizer(files, source.root)
    return source.layout == "lightning" and lightning.has_optimizer(files, source.root)


def _states(names: Collection[str]) -> list[str]:
    """Return the files beside a whole model from which a training resumes; none if one is missing.

    No metadata lists them. The Trainer silently begins anew if one of its optimizer's and its
    scheduler's states is missing.
    """
    optimizer = [name for name in names if is_of_optimizer(name)]
    states = [name for name in names if use_of(name) == "resuming"]
    state = next((name for name in names if name.rpartition("/")[2] == _TRAINER_STATE), "")
    scheduler = join(state.rpartition("/")[0], "scheduler.pt")
    if not optimizer or (state and scheduler not in names):
        return []
    states = [name for name in states if not name.endswith("training_args.bin")]
    return sorted({*optimizer, *states, *filter(None, [state])})


def closed(name: str, files: Files) -> bool:
    """Return whether a file ends as its format demands; True if the format has no known end.

    Reads a header or the end, but all of a JSON file. True also for element types that are not
    merged; False for a damaged file, such as cut JSON.
    """
    size = files.sizes()[name]
    try:
        if name.endswith(".safetensors"):
            from ckptsync.formats import safetensors

            return bool(safetensors.tensors(files, name)) or size > 8
        if _TORCH_SAVED.fullmatch(name):
            from ckptsync.formats import torch_save
            from ckptsync.layouts import sharded_tensors

            whole_file = Extent(name, 0, size)
            if torch_save.has_end(files, whole_file, sharded_tensors.ALLOWED):
                return True
            # a file that begins as neither container has no known end; one of less than 2 bytes
            # could become an archive
            return (
                size >= 2
                and read(files, Extent(name, 0, 2)) != b"PK"
                and not torch_save.is_legacy(files, whole_file)
            )
        if name.rpartition("/")[2] == PICKLED_METADATA:
            return size > 0 and read(files, Extent(name, size - 1, 1)) == b"."  # a pickle's STOP
        if name.endswith(".json"):
            parse(read_whole(files, name), name)
    except Corrupt:
        return False
    except Unsupported:
        return True  # it is finished, and its element types are not merged
    return True


def _is_hollow(files: Files, source: WeightsSource) -> bool:
    """Return whether a source of whole weights has an empty placeholder of ZeRO-3.

    False also if it cannot be read: its use raises the error. Sources that are not hollow are
    preferred. See LlamaFactory#1226 and peft#2500.
    """
    if not source.is_whole:
        return False
    try:
        weights = tensors(files, source)
    except (Incomplete, Corrupt, Unsupported):
        return False  # its use raises the same error
    return any(t.shape == (0,) for t in weights)


def _demands(files: Files, source: WeightsSource) -> dict[str, int | None]:
    """Return what a source demands; nothing if its metadata is on another node.

    Raise Corrupt or Unsupported.
    """
    try:
        return layout(source.layout).demands(files, source.root)
    except Incomplete:
        return {}  # another node has the metadata


def _world(
    files: Files, needed: Mapping[WeightsSource, object], model: Iterable[str]
) -> int | None:
    """Return the number of ranks; None if nothing says it."""
    for source, files_of_all in needed.items():
        if source.layout == "zero" and files_of_all:
            from ckptsync.layouts import zero

            return zero.world(files, source.root)
    model_ranks = ranks(model)
    return model_ranks[-1] + 1 if model_ranks else None


def is_silent_on_missing(files: Files, source: WeightsSource) -> bool:
    """Return whether a source can lose a file with all names of the tensors in it.

    Other sources have metadata that names every tensor.
    """
    if source.layout == "dcp_safetensors":
        return True  # nothing says how many shards there are
    names = files.sizes()
    if source.layout == "dcp":
        root = source.root.partition("#")[0]
        has_world = "#world=" in source.root
        return not has_world and join(root, METADATA) not in names
    # a pipeline's layer without trained weights is named by its own file alone
    return source.layout == "zero" and any(
        base.startswith("layer_") and "_expert_" not in base for base in inside(names, source.root)
    )
