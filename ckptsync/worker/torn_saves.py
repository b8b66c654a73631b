"""Finds saves that were cut short, or written over, by the names and times of their files.  Pure.

However long such files lie there, they are no checkpoint, so waiting alone cannot find them.  The
rules were found by killing Hugging Face's Trainer, accelerate, DeepSpeed and torch in the middle of
a save, and in the middle of a save over an older one of the same name.  Times are compared within
one directory only.  A copy without times (``cp -r``) gives each file the time at which it was
copied: that is not a gap between two saves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from ckptsync.checkpoint_dirs import Family
from ckptsync.layouts import file_names
from ckptsync.walk import SAME_MOMENT, SLOW, Stat

TRAINER_STATE = "trainer_state.json"
FIRST_OF_ACCELERATE = "random_states_0.pkl"
STABLE = "STABLE"  # prime-rl's, in a directory of weights
# what rank 0 of SkyRL writes for its first model, by FSDP or Megatron, and its driver after the
# last: without that file SkyRL resumes nothing
_FIRST_OF_SKYRL = frozenset({"policy/fsdp_config.json", "policy/common.pt"})
_STATE_OF_SKYRL = "trainer_state.pt"
# what rank 0 of Megatron writes first in a distributed checkpoint: the function ``save`` of
# megatron/core/dist_checkpointing/serialization.py
MEGATRON_COMMON = "common.pt"
# Which file the same process writes later in the same directory, perhaps long after a trainer has
# said that the step is saved: Megatron when its shards are saved in the background,
# Megatron-Bridge.
_FOLLOWED_BY = {MEGATRON_COMMON: ".metadata", "train_state.pt": "run_config.yaml"}
_S = 10**9
_ARGUMENTS = "training_args.bin"
# Every rank writes its random state after everything else that it writes: HF Trainer, accelerate,
# LLaMA-Factory v1
_RANDOM = re.compile(
    r"rng_state(_[0-9]+)?\.pth|random_states_[0-9]+\.pkl|(.+/)?rng_state/rank_[0-9]+\.pt"
)
_OF_RANK = re.compile(r"(.*/)?rank_([0-9]+)\.pt")
_PART = re.compile(r"(.*)-([0-9]{5})-of-([0-9]{5})\.(safetensors|bin)")
# only a trainer writes these; weights and configuration are also converted, edited and added by
# hand
_STATES = re.compile(
    r"optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|training_args\.bin|(.+/)?\.metadata"
)
# an adapter with a name of its own lies in a directory of that name
_WEIGHTS = re.compile(r"(model|pytorch_model|([^/]+/)?adapter_model)([.-].*)?\.(safetensors|bin)")
_OF_FIRST = re.compile(
    r"training_args\.bin|rng_state(_0)?\.pth|pytorch_model_fsdp(_[0-9]+)?(/\.metadata|\.bin)"
)
_TEXT = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|([^/]+/)?adapter_config|(pre)?processor_config|.+\.index)\.json"
)
_CONFIGS = re.compile(r"config\.json|([^/]+/)?adapter_config\.json")
_OF_A_RANK = re.compile(
    r"__[0-9]+_[0-9]+\.distcp|(bf16_|fp16_)?zero_pp_rank_[0-9]+_.*|rng_state_[0-9]+\.pth|random_states_[0-9]+\.pkl|mp_rank_[0-9]+_.*|rank_[0-9]+\.pt"
)
# LLaMA-Factory v1's rank 0
_OF_V1 = re.compile(r"(model|optimizer)/\.metadata|(dataloader|rng_state)/rank_0\.pt")
_BY_ACCELERATE = re.compile(r"random_states_[0-9]+\.pkl")
_BY_MEGATRON = re.compile(r"iter_[0-9]{7,}/.+", re.DOTALL)
# only its main process writes these; every rank writes a scaler.pt
_OF_ACCELERATE = re.compile(r"(optimizer|scheduler|sampler)(_[0-9]+)?\.bin")
_SHARDED_BY_ACCELERATE = re.compile(r"(pytorch_model(_fsdp)?|optimizer)(_[0-9]+)?/.+")
_NEVER_EMPTY = ("chat_template.jinja", "latest", "README.md", "zero_to_fp32.py", "zero_to_torch.py")


# Which rank wrote a file, and what each rank has still to write.


def is_random_state(path: str) -> bool:
    """Return whether this file is a rank's random state, which the rank writes last."""
    return _RANDOM.fullmatch(path) is not None


def rank_of(path: str) -> int | None:
    """Return the rank whose own file this is; None where the name does not say."""
    match = _OF_RANK.fullmatch(path)
    return int(match[2]) if match else file_names.rank(path)


def is_of_a_rank(path: str) -> bool:
    """Return whether a rank wrote this file for itself.

    A node without rank 0 holds no other files.
    """
    return _OF_A_RANK.fullmatch(path.rpartition("/")[2]) is not None


def is_of_rank_0(names: Collection[str]) -> bool:
    """Return whether rank 0 of Hugging Face's Trainer, or of LLaMA-Factory's, writes here.

    False if each file is of a rank.  Without ``trainer_state.json``, False for accelerate's scripts
    and Megatron-SWIFT (swift/megatron/trainers/base.py), which use the same directory names.
    """
    is_anothers = any(_BY_ACCELERATE.fullmatch(n) or _BY_MEGATRON.fullmatch(n) for n in names)
    return (TRAINER_STATE in names or not is_anothers) and not all(map(is_of_a_rank, names))


def current_names(files: Iterable[Stat]) -> list[str]:
    """Return the names, by path, without random states that an older save left.

    Such a random state is more than a second older than another file of its rank; ``cp -r`` mixes
    times that far.
    """
    newest: dict[int | None, int] = {}
    ordered = sorted(files)
    for file in ordered:
        if not is_random_state(file.path) and (rank := rank_of(file.path)) is not None:
            newest[rank] = max(newest.get(rank, 0), file.mtime)
    return [
        f.path
        for f in ordered
        if not is_random_state(f.path) or newest.get(rank_of(f.path), 0) - f.mtime <= _S
    ]


def lacking_file(names: Iterable[str]) -> str:
    """Return in words a file that a rank should have written by now; empty if there is none.

    A file of `_FOLLOWED_BY` without the one that follows lacks that one.  If a rank has left its
    random state, every other one should have; if none has, each must have every kind of file that
    another one has.  Else it is a missing numbered part of weights.  Ranks without any file here
    are on other nodes.
    """
    paths = list(names)
    following = (
        file_names.join(_folder(path), last)
        for path in paths
        if (last := _FOLLOWED_BY.get(path.rpartition("/")[2]))
    )
    if absent := next((path for path in following if path not in paths), ""):
        return absent
    ranks = _kinds_by_rank(paths)
    if any(map(_has_random_state, ranks.values())):
        late = next(
            (rank for rank, kinds in sorted(ranks.items()) if not _has_random_state(kinds)), None
        )
        return _absent_part(paths) if late is None else f"the random state of rank {late}"
    every = {kind for kinds in ranks.values() for kind in kinds}
    uneven = (
        (rank, kind) for rank, kinds in sorted(ranks.items()) for kind in sorted(every - kinds)
    )
    return next(
        (f"{kind.replace('#', '*')} of rank {rank}" for rank, kind in uneven), ""
    ) or _absent_part(paths)


def are_all_ranks_done(names: Iterable[str]) -> bool:
    """Return whether each rank of which a file is here has left its random state.

    False if no file is a rank's own.
    """
    ranks = _kinds_by_rank(names)
    return bool(ranks) and all(map(_has_random_state, ranks.values()))


def _kinds_by_rank(names: Iterable[str]) -> Mapping[int, set[str]]:
    """Return each rank's kinds of files: paths with their numbers replaced by ``#``."""
    ranks: dict[int, set[str]] = {}
    for name in names:
        rank = rank_of(name)
        if rank is not None:
            ranks.setdefault(rank, set()).add(re.sub(r"[0-9]+", "#", name))
    return ranks


def _has_random_state(kinds: Iterable[str]) -> bool:
    """Return whether a random state is among these kinds of files."""
    return any(is_random_state(kind.replace("#", "0")) for kind in kinds)


def _absent_part(names: Iterable[str]) -> str:
    """Return the path of the first missing numbered part of weights; empty if there is none.

    One process writes all of them; parts of a rank's own do not count.
    """
    paths = set(names)
    for match in filter(None, map(_PART.fullmatch, sorted(paths))):
        parts = (f"{match[1]}-{n:05}-of-{match[3]}.{match[4]}" for n in range(1, int(match[3]) + 1))
        absent = next((p for p in parts if p not in paths), "")
        if absent and file_names.rank(match[0]) is None:
            return absent
    return ""


# A first save that was cut short.


def half_written(files: Iterable[Stat], unclosed: Iterable[str]) -> str:
    """Return the path of a text file of the trainer's that has lost its end, or that is empty.

    An empty string if there is none.  ``unclosed``: paths of files that do not end as their format
    does.
    """
    torn = (name for name in unclosed if _TEXT.fullmatch(name))
    empty = (f.path for f in files if f.size == 0 and f.path in _NEVER_EMPTY)
    return next(torn, "") or next(empty, "")


def awaits_trainer_state(files: Sequence[Stat], *, has_trainer: bool) -> bool:
    """Return whether rank 0 of Hugging Face's Trainer writes here, so that its last file must come.

    ``has_trainer``: the Trainer is known to work in this output directory.  Otherwise files as
    ``save_pretrained`` leaves them may be all that a script writes, and a node without rank 0 holds
    only its ranks' files.
    """
    if any(_OF_FIRST.fullmatch(f.path) for f in files) or (
        has_trainer and not any(is_of_a_rank(f.path) for f in files)
    ):
        return True
    is_trainers = has_trainer or any(is_random_state(f.path) for f in files)
    return is_trainers and any(_is_of_first(f.path) for f in files)


def possibly_lacking(files: Sequence[Stat], family: Family) -> str:
    """Return a trainer's last file that is missing, if the trainer was perhaps killed before it.

    Empty if it is here, or no trainer writes one.  What the Trainer leaves in the middle of its
    first save is what ``save_pretrained`` leaves at its end, so only a similar second checkpoint
    can tell. Accelerate's ranks write their random states last, and the main process nothing
    afterwards but what scripts add.  On another node the first random state has another number
    (``save_on_each_node``).  SkyRL may take long between its two models.  prime-rl's orchestrator
    and data loaders may be long before the trainer's shards; each node that trains writes shards.
    """
    names = [f.path for f in files]
    if (
        family == "trainer"
        and is_of_rank_0(names)
        and (any(map(_is_of_first, names)) or not any(map(is_of_a_rank, names)))
    ):
        return TRAINER_STATE
    if family == "verl":
        is_begun = not _FIRST_OF_SKYRL.isdisjoint(names)
        return _STATE_OF_SKYRL if is_begun and _STATE_OF_SKYRL not in names else ""
    if family == "prime-rl":
        is_ended = STABLE in names or any(n.endswith(file_names.DCP_SHARD) for n in names)
        is_of_weights = any(map(_WEIGHTS.fullmatch, names))
        return "" if is_ended else STABLE if is_of_weights else "trainer/.metadata"
    if family not in ("trainer", "accelerate"):
        return ""
    has_random_state = any(map(_BY_ACCELERATE.fullmatch, names))
    if (
        family == "accelerate"
        and any(map(_SHARDED_BY_ACCELERATE.fullmatch, names))
        and not has_random_state
    ):
        return "random_states_*.pkl"
    is_begun = any(map(_OF_ACCELERATE.fullmatch, names))
    is_shared = has_random_state and any(
        n.endswith(".safetensors") or _WEIGHTS.fullmatch(n) for n in names
    )
    return (
        FIRST_OF_ACCELERATE if (is_begun or is_shared) and FIRST_OF_ACCELERATE not in names else ""
    )


def _is_of_first(name: str) -> bool:
    """Return whether nodes without rank 0 hardly ever have this file."""
    return any(p.fullmatch(name) for p in (_CONFIGS, _WEIGHTS, _OF_V1))


def without_arguments(files: Iterable[Stat]) -> str:
    """Return why a final model is not all that ``Trainer.save_model`` writes; empty if it is.

    Its last file is ``training_args.bin``.  Scripts that write over the weights afterwards
    (LLaMA-Factory's reward models) do so before ``Trainer.save_state``, if they call that.
    """
    stats = list(files)
    ended = max((f.mtime for f in stats if f.path in (_ARGUMENTS, TRAINER_STATE)), default=None)
    if ended is None:
        return f"no {_ARGUMENTS}, which the trainer writes last: the trainer was killed"
    newer = next((f.path for f in stats if f.mtime > ended and _WEIGHTS.fullmatch(f.path)), "")
    return (
        f"{newer} was overwritten, and the trainer was killed before it wrote {_ARGUMENTS}"
        if newer
        else ""
    )


# Two saves in one directory.


def two_saves(files: Sequence[Stat], last_file_mtime: int | None, rest_time: float) -> str:
    """Return why these files are of two saves, the later of which did not end; else empty.

    ``last_file_mtime``: of what the trainer writes last (ns); None: that of accelerate's or
    prime-rl's last file, if here, else that comparison is left out.  ``rest_time``: seconds without
    a write after which a save is over.
    """
    if last_file_mtime is None:
        last_file_mtime = next(
            (f.mtime for f in files if f.path in (FIRST_OF_ACCELERATE, STABLE)), None
        )
    return (
        (
            _find_overwritten(files, last_file_mtime, rest_time)
            if last_file_mtime is not None
            else ""
        )
        or _find_uneven_shards(files, rest_time)
        or _find_old_random_state(files, rest_time)
        or _find_late_shard(files)
        or _find_old_metadata(files)
        or _find_old_parts(files)
    )


def stale_metadata(files: Iterable[Stat], tolerance: float = 0.0) -> str:
    """Return a ``.metadata`` whose shards are newer by more than ``tolerance`` seconds; else empty.

    torch replaces ``.metadata`` last.  After a ``cp -r`` shards are a little newer, too.
    """
    stats = list(files)
    newest: dict[str, int] = {}
    for folder, shard in _dcp_shards(stats):
        newest[folder] = max(newest.get(folder, 0), shard.mtime)
    stale = (
        f.path
        for f in stats
        if is_metadata(f.path) and newest.get(_folder(f.path), 0) - f.mtime > tolerance * _S
    )
    return next(stale, "")


def is_metadata(path: str) -> bool:
    """Return whether this is the file that ends torch's distributed checkpoints."""
    return path.rpartition("/")[2] == ".metadata"


def _dcp_shards(files: Iterable[Stat]) -> Iterator[tuple[str, Stat]]:
    """Yield the shards that a ``.metadata`` beside them describes, with their directory."""
    stats = list(files)
    folders = {_folder(f.path) for f in stats if is_metadata(f.path)}
    for file in stats if folders else ():
        folder, _, name = file.path.rpartition("/")
        if folder in folders and name.endswith(file_names.DCP_SHARD):
            yield folder, file


def _folder(path: str) -> str:
    """Return the directory of a path."""
    return path.rpartition("/")[0]


def _find_overwritten(files: Sequence[Stat], last_file_mtime: int, rest_time: float) -> str:
    """Return, in words, which file of a new save follows the trainer's last file; empty if none.

    It is a file that only a trainer writes; else, after ``rest_time`` seconds without a write, a
    random state, or weights beside a configuration that is as new.
    """
    trainer_files = (
        _find_trainer_file(newer, files)
        for newer in _written_after(files, last_file_mtime, SAME_MOMENT)
    )
    over = next(filter(None, trainer_files), "")
    for newer in _written_after(files, last_file_mtime, rest_time) if not over else ():
        # anybody may write weights, but hardly with their configuration
        is_configured = any(_CONFIGS.fullmatch(f.path) for f in newer)
        random = (f.path for f in newer if is_random_state(f.path))
        over = next(random, "") or next(
            (f.path for f in newer if is_configured and _WEIGHTS.fullmatch(f.path)), ""
        )
        if over:
            break
    return f"{over} was overwritten, but the trainer's last file was not" if over else ""


def _written_after(files: Iterable[Stat], ended: int, least: float) -> Iterator[Sequence[Stat]]:
    """Yield, for each pause, the later files, oldest first, of those newer than ``ended`` (ns).

    A pause is longer than ``least`` seconds and the time of writing the file after it.
    """
    newer = sorted((f for f in files if f.mtime > ended), key=lambda f: f.mtime)
    before = ended
    for n, file in enumerate(newer):
        if _is_gap(before, file, least):
            yield newer[n:]
        before = file.mtime


def _find_trainer_file(newer: Sequence[Stat], files: Sequence[Stat]) -> str:
    """Return a file in ``newer`` that only a new save writes; empty if there is none.

    These are trainer states, some of a model's parts, and random states: any beside new weights,
    else those of ranks without shards, since a rank with shards waits for the others first.
    """
    states = next((f.path for f in newer if _is_of_states(f.path)), "")
    sharded = _sharded_ranks(files)
    is_of_weights = any(_WEIGHTS.fullmatch(f.path) for f in newer)
    random = (
        f.path
        for f in newer
        if is_random_state(f.path) and (is_of_weights or rank_of(f.path) not in sharded)
    )
    return states or _find_newer_part(newer, files) or next(random, "")


def _find_old_parts(files: Sequence[Stat]) -> str:
    """Return, as text, which part of a model is newer than the trainer's arguments and other parts.

    Empty if none is.  Those arguments end a save of the final model.
    """
    ended = next((f.mtime for f in files if f.path == _ARGUMENTS), None)
    later = _written_after(files, ended, SAME_MOMENT) if ended is not None else ()
    part = next(filter(None, (_find_newer_part(newer, files) for newer in later)), "")
    return f"{part} was overwritten, but other parts were not" if part else ""


def _find_newer_part(newer: Sequence[Stat], files: Iterable[Stat]) -> str:
    """Return one of a model's parts in ``newer`` if other parts are older; else empty."""

    def model(path: str) -> str:
        """Return the model's name of a numbered part; empty for other files."""
        return (
            re.sub(r"-[0-9]{5}-of-", "-of-", path)
            if re.search(r"-[0-9]{5}-of-[0-9]{5}\.", path)
            else ""
        )

    names = {f.path for f in newer}
    split = {model(f.path) for f in files if f.path not in names} & set(map(model, names)) - {""}
    return next((f.path for f in newer if model(f.path) in split), "")


def _find_uneven_shards(files: Iterable[Stat], rest_time: float) -> str:
    """Return, as text, which shard is much older than others of its kind; empty if none is.

    Ranks write them at the same time.
    """
    kinds: defaultdict[str, list[Stat]] = defaultdict(list)
    for file in files:
        if _is_shard(file.path):
            kinds[re.sub(r"[0-9]+", "#", file.path)].append(file)
    for shards in kinds.values():
        for older, newer in pairwise(sorted(shards, key=lambda f: f.mtime)):
            if _is_gap(older.mtime, newer, rest_time):
                return f"{older.path} is of an older save than {newer.path}"
    return ""


def _find_old_random_state(files: Iterable[Stat], rest_time: float) -> str:
    """Return, as text, that a random state is much older than all states and weights; else empty.

    Its rank has not ended the new save.
    """
    random = [f for f in files if is_random_state(f.path)]
    states = [f for f in files if _is_of_states(f.path) or _WEIGHTS.fullmatch(f.path)]
    first = min(states, key=lambda f: f.mtime, default=None)
    oldest = min(random, key=lambda f: f.mtime, default=None)
    if first is None or oldest is None or not _is_gap(oldest.mtime, first, rest_time):
        return ""
    return f"{oldest.path} is of an older save"


def _find_late_shard(files: Sequence[Stat]) -> str:
    """Return, as text, which shard was written after a rank's random state; empty if none was.

    Only ranks with shards count: none of them writes its random state before all shards are there.
    """
    sharded = _sharded_ranks(files)
    ordered = sorted(files, key=lambda f: f.mtime) if sharded else []
    ends = ""
    for n, (before, file) in enumerate(pairwise(ordered), 1):
        ends = ends or (
            before.path if is_random_state(before.path) and rank_of(before.path) in sharded else ""
        )
        if ends and _is_gap(before.mtime, file, SAME_MOMENT):
            shard = next((f.path for f in ordered[n:] if _is_shard(f.path)), "")
            return f"{shard} was overwritten after {ends}" if shard else ""
    return ""


def _sharded_ranks(files: Iterable[Stat]) -> set[int | None]:
    """Return the ranks that wrote shards."""
    return {rank_of(f.path) for f in files if _is_shard(f.path)} - {None}


def _is_shard(path: str) -> bool:
    """Return whether the layouts know this file as a shard: ranks write those side by side."""
    kind = file_names.file_kind(path)
    return kind is not None and kind.is_shard


def _is_of_states(path: str) -> bool:
    """Return whether only a trainer writes this file."""
    return _STATES.fullmatch(path) is not None or _is_shard(path)


def _find_old_metadata(files: Sequence[Stat]) -> str:
    """Return, as text, which shard was written long after the ``.metadata`` beside it; else empty.

    torch replaces it when all shards are there.
    """
    shards = list(_dcp_shards(files))
    for end in (f for f in files if is_metadata(f.path)):
        newer = (
            shard
            for folder, shard in shards
            if folder == _folder(end.path) and shard.mtime > end.mtime
        )
        first = min(newer, key=lambda f: f.mtime, default=None)
        if first is not None and _is_gap(end.mtime, first, SAME_MOMENT):
            return f"{first.path} was overwritten, and {end.path} was not"
    return ""


def _is_gap(before: int, file: Stat, least: float) -> bool:
    """Return whether a file is newer than ``before`` (ns) by more than ``least`` seconds.

    The time that writing it takes, at `SLOW` bytes a second, is added to ``least``.
    """
    return file.mtime - before > (least + file.size / SLOW) * _S
