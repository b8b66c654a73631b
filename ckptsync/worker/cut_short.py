"""What a crash leaves in the middle of a save, and no trainer at its end: however long it lies there, it is no checkpoint.  Pure.

Seen of Hugging Face's Trainer, DeepSpeed and torch, killed in the middle of a save, and of one over an older save of the same name.  Times are
compared within a directory only; those that a copy without times gives, file after file as fast as they can be read, are no gap.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise

from ckptsync.merge.dated import AT_ONCE, SLOW
from ckptsync.scan import Family
from ckptsync.walk import Stat
from ckptsync.worker.evenness import is_random_state, rank

TRAINER_STATE = "trainer_state.json"
_S = 10**9
_DCP_SHARD = re.compile(r"__[0-9]+_[0-9]+\.distcp")
_SHARD = re.compile(r"(.+/)?(__[0-9]+_[0-9]+\.distcp|[a-z0-9_]+_optim_states\.pt|zero_pp_rank_[0-9]+_[a-z0-9_]+_states\.pt)")
# what nobody but a trainer writes there; weights and configuration are converted, edited and added by hand
_STATES = re.compile(rf"optimizer\.(pt|bin)|scheduler\.pt|scaler\.pt|training_args\.bin|(.+/)?\.metadata|{_SHARD.pattern}")
_WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)([.-].*)?\.(safetensors|bin)")
_OF_FIRST = re.compile(r"training_args\.bin|rng_state(_0)?\.pth|pytorch_model_fsdp(_[0-9]+)?(/\.metadata|\.bin)")
_TEXT = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|adapter_config|(pre)?processor_config|.+\.index)\.json"
)
_CONFIGS = ("config.json", "adapter_config.json")
_OF_A_RANK = re.compile(
    r"__[0-9]+_[0-9]+\.distcp|(bf16_|fp16_)?zero_pp_rank_[0-9]+_.*|rng_state_[0-9]+\.pth|random_states_[0-9]+\.pkl|mp_rank_[0-9]+_.*|rank_[0-9]+\.pt"
)
_OF_V1 = re.compile(r"(model|optimizer)/\.metadata|(dataloader|rng_state)/rank_0\.pt")  # LLaMA-Factory v1's rank 0
BY_ACCELERATE = re.compile(r"random_states_[0-9]+\.pkl")
_FIRST_OF_ACCELERATE = "random_states_0.pkl"
_OF_ACCELERATE = re.compile(
    r"(optimizer|scheduler|sampler)(_[0-9]+)?\.bin"
)  # its main process alone; every rank writes a scaler.pt
_SHARDED_BY_ACCELERATE = re.compile(r"(pytorch_model(_fsdp)?|optimizer)(_[0-9]+)?/.+")
_ARGUMENTS = "training_args.bin"
_NEVER_EMPTY = ("chat_template.jinja", "latest", "README.md", "zero_to_fp32.py", "zero_to_torch.py")


def half_written(files: Iterable[Stat], unclosed: Iterable[str]) -> str:
    """A text that the trainer itself writes and that has lost its end: opening it anew empties it first."""
    torn = (name for name in unclosed if _TEXT.fullmatch(name))
    empty = (f.path for f in files if f.size == 0 and f.path in _NEVER_EMPTY)
    return next(torn, "") or next(empty, "")


def awaits_its_end(files: Sequence[Stat], *, awaited: bool) -> bool:
    """Whether rank 0 of Hugging Face's Trainer has begun to write here: then its last file belongs here, too.

    ``awaited``: that it is at work in this output directory.  Else what looks as ``save_pretrained`` leaves it may be just that, and a node
    without rank 0 holds its ranks' files alone.
    """
    if any(_OF_FIRST.fullmatch(f.path) for f in files) or (awaited and not any(is_of_a_rank(f.path) for f in files)):
        return True
    is_its = awaited or any(is_random_state(f.path) for f in files)
    return is_its and any(_is_of_first(f.path) for f in files)


def may_be_cut_short(files: Sequence[Stat], family: Family) -> str:
    """The last file of a trainer that has perhaps been killed before it wrote that, and perhaps never writes it.

    What Trainer leaves in its first save is what ``save_pretrained`` leaves at its end: only another checkpoint like it tells.
    """
    names = [f.path for f in files]
    if family == "trainer" and is_of_rank_0(names) and (any(map(_is_of_first, names)) or not any(map(is_of_a_rank, names))):
        return TRAINER_STATE
    if (
        family == "accelerate"
        and any(map(_SHARDED_BY_ACCELERATE.fullmatch, names))
        and not any(map(BY_ACCELERATE.fullmatch, names))
    ):
        return "random_states_*.pkl"
    return _random_state(names) if family in ("trainer", "accelerate") else ""


def _is_of_first(name: str) -> bool:
    """Whether it is hardly of a node without rank 0."""
    return name in _CONFIGS or bool(_WEIGHTS.fullmatch(name) or _OF_V1.fullmatch(name))


def _random_state(names: Sequence[str]) -> str:
    """Of accelerate's: its ranks write them last, and the main process nothing afterwards but what scripts add.

    That of another node has another number (``save_on_each_node``): then, too, a checkpoint like it tells.
    """
    is_begun = any(map(_OF_ACCELERATE.fullmatch, names))
    is_shared = any(map(BY_ACCELERATE.fullmatch, names)) and any(n.endswith(".safetensors") or _WEIGHTS.fullmatch(n) for n in names)
    return _FIRST_OF_ACCELERATE if (is_begun or is_shared) and _FIRST_OF_ACCELERATE not in names else ""


def without_arguments(files: Iterable[Stat]) -> str:
    """Why a model in the root is not all that ``Trainer.save_model`` writes; empty if it is.  Its last file is ``training_args.bin``.

    What a script does with the weights afterwards (LLaMA-Factory's reward models are written over) comes before ``Trainer.save_state``, if it calls that.
    """
    there = list(files)
    ended = max((f.mtime for f in there if f.path in (_ARGUMENTS, TRAINER_STATE)), default=None)
    newer = next((f.path for f in there if ended is not None and f.mtime > ended and _WEIGHTS.fullmatch(f.path)), "")
    if ended is None:
        return f"no {_ARGUMENTS}, which the trainer writes last, and it was killed"
    return f"{newer} was written over, and the trainer was killed before it wrote {_ARGUMENTS}" if newer else ""


def is_of_rank_0(names: Collection[str]) -> bool:
    """Whether, of all trainers that name a directory as Hugging Face's does, it or LLaMA-Factory's writes here with rank 0."""
    return (TRAINER_STATE in names or not any(map(BY_ACCELERATE.fullmatch, names))) and not all(map(is_of_a_rank, names))


def is_of_a_rank(path: str) -> bool:
    """Whether a rank wrote it for itself: a node without global rank 0 holds nothing else (and of rank 0 itself, nobody can say)."""
    return _OF_A_RANK.fullmatch(path.rpartition("/")[2]) is not None


def two_saves(files: Sequence[Stat], ended: int | None, apart: float) -> str:
    """Why these are of two saves, the later of which did not come to its end; empty if nothing shows it.

    ``ended``: the mtime (ns) of what the trainer writes last, where that is here.  ``apart``: seconds of rest after which a save is over.
    """
    if ended is None:
        ended = next((f.mtime for f in files if f.path == _FIRST_OF_ACCELERATE), None)
    return (
        (_begun_after(files, ended, apart) if ended is not None else "")
        or _uneven(files, apart)
        or _old_random_state(files, apart)
        or _after_random_state(files)
        or _old_metadata(files)
        or _old_parts(files)
    )


def stale_metadata(files: Iterable[Stat], tolerance: float = 0.0) -> str:
    """The name of a ``.metadata`` with shards beside it that are newer by more than ``tolerance`` seconds: DCP replaces it last.

    A little newer they are after a ``cp -r`` too, which is no proof of anything; a save written over an old one is further apart.
    """
    there = list(files)
    ends = [f for f in there if f.path.endswith(".metadata") and is_metadata(f)]
    newest: dict[str, int] = {}
    for f in there if ends else ():
        folder, _, name = f.path.rpartition("/")
        if _DCP_SHARD.fullmatch(name):
            newest[folder] = max(newest.get(folder, 0), f.mtime)
    stale = (f.path for f in ends if newest.get(f.path.rpartition("/")[0], 0) - f.mtime > tolerance * 1e9)
    return next(stale, "")


def is_metadata(file: Stat) -> bool:
    """Whether it is what torch's distributed checkpoint ends with."""
    return file.path.rpartition("/")[2] == ".metadata"


def _begun_after(files: Sequence[Stat], ended: int, apart: float) -> str:
    surely = (_of_no_callback(newer, files) for newer in _later(files, ended, AT_ONCE))
    over = next(filter(None, surely), "") or next(filter(None, map(_of_a_save, _later(files, ended, apart))), "")
    return f"{over} was written over, and what the trainer writes last was not" if over else ""


def _later(files: Iterable[Stat], ended: int, least: float) -> Iterator[Sequence[Stat]]:
    """What is newer, from each rest of so many seconds on: so long ranks and callbacks may take that add to a save."""
    newer = sorted((f for f in files if f.mtime > ended), key=lambda f: f.mtime)
    before = ended
    for n, file in enumerate(newer):
        if _is_gap(before, file, least):
            yield newer[n:]
        before = file.mtime


def _of_no_callback(newer: Sequence[Stat], files: Sequence[Stat]) -> str:
    """What nobody but the trainer writes, or not so: some of a model's parts, random states of ranks that wait for no other (those with shards do)."""
    states = next((f.path for f in newer if _STATES.fullmatch(f.path)), "")
    sharded = _sharded(files)
    is_of_weights = any(_WEIGHTS.fullmatch(f.path) for f in newer)
    random = (f.path for f in newer if is_random_state(f.path) and (is_of_weights or rank(f.path) not in sharded))
    return states or _some_parts(newer, files) or next(random, "")


def _old_parts(files: Sequence[Stat]) -> str:
    """Some of a model's parts are newer than the trainer's arguments, which end a save of the final model, and others are not."""
    ended = next((f.mtime for f in files if f.path == _ARGUMENTS), None)
    later = _later(files, ended, AT_ONCE) if ended is not None else ()
    part = next(filter(None, (_some_parts(newer, files) for newer in later)), "")
    return f"{part} was written over, and other parts were not" if part else ""


def _some_parts(newer: Sequence[Stat], files: Iterable[Stat]) -> str:
    """One of a model's parts, if others are older."""
    names = {f.path for f in newer}
    split = {_part_of(f.path) for f in files if f.path not in names} & {_part_of(name) for name in names} - {""}
    return next((f.path for f in newer if _part_of(f.path) in split), "")


def _part_of(path: str) -> str:
    """All numbered parts of one model have this in common."""
    return re.sub(r"-[0-9]{5}-of-", "-of-", path) if re.search(r"-[0-9]{5}-of-[0-9]{5}\.", path) else ""


def _of_a_save(newer: Sequence[Stat]) -> str:
    """What the trainer has begun to write again.  Weights may be anybody's work, but hardly with their configuration."""
    random = (f.path for f in newer if is_random_state(f.path))
    weights = (f.path for f in newer if _WEIGHTS.fullmatch(f.path) and any(other.path in _CONFIGS for other in newer))
    return next(random, "") or next(weights, "")


def _uneven(files: Iterable[Stat], apart: float) -> str:
    """Of shards of one kind, which ranks write side by side, some are much older than the others."""
    kinds: defaultdict[str, list[Stat]] = defaultdict(list)
    for file in files:
        if _SHARD.fullmatch(file.path):
            kinds[re.sub(r"[0-9]+", "#", file.path)].append(file)
    for its in kinds.values():
        for older, newer in pairwise(sorted(its, key=lambda f: f.mtime)):
            if _is_gap(older.mtime, newer, apart):
                return f"{older.path} is of an older save than {newer.path}"
    return ""


def _old_random_state(files: Iterable[Stat], apart: float) -> str:
    """A rank's random state that is much older than all that is no random state: that rank has not come so far again."""
    random = [f for f in files if is_random_state(f.path)]
    rest = [f for f in files if _STATES.fullmatch(f.path) or _WEIGHTS.fullmatch(f.path)]
    first = min(rest, key=lambda f: f.mtime, default=None)
    oldest = min(random, key=lambda f: f.mtime, default=None)
    if first is None or oldest is None or not _is_gap(oldest.mtime, first, apart):
        return ""
    return f"{oldest.path} is of an older save"


def _after_random_state(files: Sequence[Stat]) -> str:
    """A shard that was written when a rank with shards had left its random state, which no rank does before all shards are there."""
    sharded = _sharded(files)
    ordered = sorted(files, key=lambda f: f.mtime) if sharded else []
    ends = ""
    for n, (before, file) in enumerate(pairwise(ordered), 1):
        ends = ends or (before.path if is_random_state(before.path) and rank(before.path) in sharded else "")
        if ends and _is_gap(before.mtime, file, AT_ONCE):
            shard = next((f.path for f in ordered[n:] if _SHARD.fullmatch(f.path)), "")
            return f"{shard} was written over after {ends}" if shard else ""
    return ""


def _sharded(files: Iterable[Stat]) -> set[int | None]:
    """Ranks with shards here."""
    return {rank(f.path) for f in files if _SHARD.fullmatch(f.path)} - {None}


def _old_metadata(files: Sequence[Stat]) -> str:
    """torch replaces ``.metadata`` when all shards are there."""
    for end in files:
        folder, _, name = end.path.rpartition("/")
        if name != ".metadata":
            continue
        newer = (f for f in files if f.path.rpartition("/")[0] == folder and f.mtime > end.mtime and f.path.endswith(".distcp"))
        first = min(newer, key=lambda f: f.mtime, default=None)
        if first is not None and _is_gap(end.mtime, first, AT_ONCE):
            return f"{first.path} was written over, and {end.path} was not"
    return ""


def _is_gap(before: int, file: Stat, least: float) -> bool:
    """Whether more time passed than it takes to write, or to copy, that file."""
    return file.mtime - before > (least + file.size / SLOW) * _S
