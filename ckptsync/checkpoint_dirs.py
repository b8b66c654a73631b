"""Find the checkpoints in an output directory, whichever trainer wrote them.

`find_checkpoint_dirs` looks at names, and into directories only as far as their family needs. A
checkpoint's name in a store follows from its path alone, so that every node and every scan gives it
the same name. `list_checkpoint` lists the files of one.

The names and places were read in the trainers' sources and seen in real runs: transformers 5.23,
accelerate 1.15, DeepSpeed 0.19.8, torchtitan 0.3, verl 0.9.1, Lightning 2.6.6, LLaMA-Factory 0.9.5,
Ray Train 2.60; and, as of August 2026, in those of SkyRL (skyrl/train/trainer.py,
skyrl/backends/skyrl_train/distributed/), prime-rl (src/prime_rl/trainer/ckpt.py), ms-swift
(swift/utils/utils.py, swift/megatron/trainers/base.py), slime (slime/backends/megatron_utils/),
OpenRLHF (openrlhf/trainer/ray/ppo_actor.py, openrlhf/utils/deepspeed/deepspeed.py) and
Megatron-Bridge (src/megatron/bridge/training/checkpointing.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import Literal, get_args

from ckptsync.errors import ConfigError, StoreError
from ckptsync.safe_names import LOGS, RECORDS, is_ours
from ckptsync.walk import SPOOL, Stat, walk

Family = Literal[
    "trainer", "accelerate", "deepspeed", "dcp", "verl", "prime-rl", "lightning", "final"
]
FINAL = "final"  # the model that a trainer leaves beside its checkpoints when it is done
ASIDE = "_ckptsync-aside"
"""The directory of an output directory into which `ckptsync resume` moves checkpoints aside."""
# accelerate's projects, torchtitan's dump folder, Lightning under most loggers
NESTED = ("checkpoints", "checkpoint")
# DeepSpeed's files of a rank, of its experts, and of a pipeline's layers: a node may hold one kind
_STATES = re.compile(
    r"(bf16_|fp16_)?(zero_pp_rank_[0-9]+_|expp_rank_[0-9]+_|(layer_[0-9]+_)?expert_[0-9]+_)?mp_rank_[0-9]+_(model|optim)_states\.pt"
    r"|layer_[0-9]+(-model_[0-9]+)?-model_states\.pt"
)
_DCP = re.compile(
    r"\.metadata|__[0-9]+_[0-9]+\.distcp|.+\.safetensors(\.index\.json)?"
    r"|metadata\.pkl|(model|optimizer)_[0-9]+\.pt"  # torch_checkpointing's
)
# of verl's PPO trainer; of its SFT trainer, which has no directory for its one model; of SkyRL
_VERL = re.compile(
    r"actor|critic|policy|model|optimizer|extra|dist_ckpt|huggingface|data(_[0-9]+)?\.pt"
    r"|(model|optim|extra_state)_world_size_[0-9]+_rank_[0-9]+\.pt|.+\.safetensors"
)
# of prime-rl: what its trainer saves to resume from, and its weights for others to read, which it
# wrote until August 2026; its orchestrator writes beside the trainer, and may be early
_PRIME_RL = re.compile(r"trainer|STABLE|.+\.safetensors|pytorch_model.*\.bin")
_ANYTHING = re.compile(r".*", re.DOTALL)
# Ray Train's names are dates
_RAY = re.compile(
    r"checkpoint_[0-9]{4}-[0-9][0-9]-[0-9][0-9]_[0-9][0-9]-[0-9][0-9]-[0-9][0-9]\.[0-9]{6}",
    re.ASCII,
)
# The name of a checkpoint's directory, its family, and a name in it if other directories may have
# such names.
_NUMBERED: tuple[tuple[re.Pattern[str], Family, re.Pattern[str] | None], ...] = (
    (re.compile(r"checkpoint-[0-9]{1,18}"), "trainer", None),
    (re.compile(r"checkpoint_[0-9]{1,18}"), "accelerate", None),
    (_RAY, "accelerate", None),  # whatever is in it
    (re.compile(r"step-[0-9]{1,18}"), "dcp", _DCP),
    (re.compile(r"step_[0-9]{1,18}"), "prime-rl", _PRIME_RL),
    # Megatron-Core, slime, Megatron-Bridge
    (re.compile(r"iter_[0-9]{7,18}"), "dcp", _DCP),
    (re.compile(r"global_step_[0-9]{1,18}"), "verl", _VERL),  # and SkyRL
)
_LIGHTNING = ".ckpt"  # a file, or the directory of a sharded one
_VERSION = re.compile(r"version_[0-9]{1,9}")
_STEP = re.compile(r"(?<![0-9])([0-9]{1,18})\Z")
_STEP_OF_LIGHTNING = re.compile(r"step-([0-9]{1,18})")
_SECOND = re.compile(r"\.\d+$")  # ends the names of further checkpoints of one name, aside
# The name of a directory whose checkpoints get its name before theirs, without ``_``, and their
# family.
_SEARCHED: tuple[tuple[re.Pattern[str], Family], ...] = (
    (re.compile(r"run-[A-Za-z0-9_-]{1,60}"), "trainer"),  # Trainer.hyperparameter_search's trial
    # one start of a training with ms-swift
    (re.compile(r"v[0-9]{1,6}-[0-9]{8}-[0-9]{6}", re.ASCII), "trainer"),
    (re.compile(r"weights"), "prime-rl"),
    # OpenRLHF: of a PPO training, its two models; of the others, the default directories
    (re.compile(r"_actor|_critic|checkpoints_(sft|rm|dpo)"), "deepspeed"),
)
# a spool, and the records of a store that somebody copied by hand
_NO_CHECKPOINT = (SPOOL, RECORDS)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

WEIGHTS = re.compile(
    r"((adapter_)?model(-[0-9]{5}-of-[0-9]{5})?\.safetensors)|((pytorch|adapter)_model(-[0-9]{5}-of-[0-9]{5})?\.bin)"
)
_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
# A model's own files, and what a trainer writes about it at the end; logs, which grow at any time,
# are not among them.
# In transformers' tokenizers vocabularies end in .spm (Marian, Speech2Text), .codes (PhoBERT),
# .tokenizer (ProphetNet), too.
OF_MODEL = re.compile(
    r"[A-Za-z0-9].*\.(safetensors|bin|json|model|spm|codes|tokenizer|jinja|tiktoken|py|md)|(vocab|merges|dict)\.txt|\.tmp.{6}",
    re.DOTALL,
)


# formats of which no trainer that is known here writes a final model
_FOREIGN = re.compile(
    r".+\.(npz|gguf|ggml|nemo|msgpack|h5|hdf5|keras|pdparams|onnx|mlmodel)", re.IGNORECASE
)
# a file that shows that a directory holds weights; the last are Orbax's and TensorFlow's
_SHOWS_WEIGHTS = re.compile(
    rf"{_FOREIGN.pattern}|.+\.(safetensors|bin|pt|pth|ckpt|distcp)|manifest\.ocdbt"
    r"|_CHECKPOINT_METADATA|.+\.data-[0-9]{5}-of-[0-9]{5}",
    re.IGNORECASE,
)
_MOST_STRAYS = 200  # directories that are searched


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """The place of a checkpoint on disk.

    ``name`` is its location in a store: one plain path component. ``only``: the names in ``path``
    that belong to it, if it has no directory of its own.
    """

    name: str
    family: Family
    path: Path
    only: tuple[str, ...] | None = None

    @property
    def step(self) -> int | None:
        """The step in the name, or None; for Ray's names, the digits of the date."""
        if _RAY.fullmatch(self.name):
            return int(re.sub(r"\D", "", self.name))
        return series_and_step(self.name)[1]


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """The files of a checkpoint at one moment.

    `ckptsync.walk.Listing` explains ``files``, ``partial`` and ``others``.
    """

    name: str
    family: Family
    path: Path
    files: tuple[Stat, ...]
    partial: tuple[Stat, ...]
    others: tuple[str, ...]


def list_checkpoint(checkpoint_dir: CheckpointDir) -> ListedCheckpoint:
    """Return the present files of a checkpoint: none if it has vanished. Raises as `walk`."""
    below = walk(checkpoint_dir.path, checkpoint_dir.only)
    return ListedCheckpoint(
        checkpoint_dir.name,
        checkpoint_dir.family,
        checkpoint_dir.path,
        below.files,
        below.partial,
        below.others,
    )


def list_aside(output_dir: Path) -> dict[str, tuple[str, tuple[Stat, ...]]]:
    """Return the checkpoints in `ASIDE`: the name there → the checkpoint's name, and its files.

    The checkpoint's name is the name there without a number at its end (``.2``). Paths of files are
    relative to the checkpoint; a file directly in `ASIDE` is a checkpoint by itself. Unfinished
    files are left out; {} without `ASIDE`. Raises as `ckptsync.walk.walk`.
    """
    files: dict[str, list[Stat]] = {}
    for file in walk(output_dir / ASIDE).files:
        name, _, path_in_checkpoint = file.path.partition("/")
        files.setdefault(name, []).append(replace(file, path=path_in_checkpoint or name))
    return {name: (_SECOND.sub("", name), tuple(stats)) for name, stats in files.items()}


def find_checkpoint_dirs(output_dir: Path) -> tuple[CheckpointDir, ...]:
    """Return the checkpoints of an output directory, sorted by name, without listing their files.

    () if it does not exist. No two have one name: the second that is found gets a name made of its
    path. Links are not followed. Raises ConfigError if a directory may not be read, StoreError if
    the disk fails.
    """
    entries = _entries(output_dir)  # once: 100,000 files of somebody else's may lie there
    candidates = _candidates(entries)
    by_name: dict[str, CheckpointDir] = {}
    for folder, above, families in _searched_folders(output_dir, candidates):
        is_top = folder == output_dir
        for entry in candidates if is_top else _candidates(_entries(folder)):
            checkpoint_dir = _checkpoint_of(folder, entry, above)
            if (
                checkpoint_dir
                and checkpoint_dir.family in families
                and not (is_top and entry.name in NESTED)
            ):
                name = (
                    _second_name(checkpoint_dir, output_dir)
                    if checkpoint_dir.name in by_name
                    else checkpoint_dir.name
                )
                by_name[name] = replace(checkpoint_dir, name=name)
        if is_top and (final := _final(output_dir, entries)):
            by_name[FINAL] = final
    return tuple(by_name[name] for name in sorted(by_name))


def _searched_folders(
    output_dir: Path, entries: Iterable[os.DirEntry[str]]
) -> Iterator[tuple[Path, str, Collection[str]]]:
    """Yield each folder that may hold checkpoints, the prefix of their names, and their families.

    The output directory is first, with all families. ``entries``: its own. Lazy: Lightning's logs
    are listed last, and that raises as `_entries`.
    """
    everything = get_args(Family)
    yield output_dir, "", everything
    inside = {e.name for e in entries if e.is_dir(follow_symlinks=False)}
    for name in (name for name in NESTED if name in inside):
        yield output_dir / name, "", [family for family in everything if family != "deepspeed"]
    for name in sorted(inside):
        if family := _searched_family(name):
            yield output_dir / name, _prefix(name), [family]
    logs = output_dir / "lightning_logs"
    for entry in _candidates(_entries(logs)) if logs.name in inside else ():
        saved = logs / entry.name / "checkpoints"
        if _VERSION.fullmatch(entry.name) and _is_own_folder(entry) and not saved.is_symlink():
            yield saved, f"{entry.name}.", ["lightning"]


def holds_checkpoints(name: str) -> bool:
    """Return whether a directory of this name in an output directory holds checkpoints."""
    return name in NESTED or _searched_family(name) is not None


def _searched_family(name: str) -> Family | None:
    """Return the family of `_SEARCHED` for a directory's name; None if it is not searched."""
    return next((family for pattern, family in _SEARCHED if pattern.fullmatch(name)), None)


def _prefix(name: str) -> str:
    """Return what comes before the names of checkpoints in a directory of `_SEARCHED`."""
    return f"{name.lstrip('_')}."


def _second_name(checkpoint_dir: CheckpointDir, output_dir: Path) -> str:
    """Return a name for a checkpoint whose plain name another one has: its path, joined by dots.

    For Lightning: a digest of the path, and ``.ckpt``.
    """
    parts = (*checkpoint_dir.path.relative_to(output_dir).parts, *(checkpoint_dir.only or ()))
    if checkpoint_dir.family == "lightning":
        return _tagged("/".join(parts)) + _LIGHTNING
    return ".".join(parts)


def checkpoint_dir_at(directory: Path) -> CheckpointDir | None:
    """Return ``directory`` itself as a checkpoint, or None if nothing says that it is one.

    Links are resolved first. Raises as `find_checkpoint_dirs`.
    """
    path = directory.resolve()
    return _checkpoint_dir(path.parent, path.name)


def is_plain_name(name: str) -> bool:
    """Return whether a store can keep a checkpoint under this very name."""
    is_taken = name in NESTED or name.casefold() == LOGS or is_ours(name)
    return bool(_PLAIN.fullmatch(name)) and not is_taken


def is_named_like_one(name: str) -> bool:
    """Return whether a name begins as a checkpoint's does, such as ``checkpoint-4 (copy)``.

    True also for a checkpoint's own name. A digit may not follow.
    """
    return any(
        match and not name[match.end() :][:1].isdigit()
        for match in (pattern.match(name) for pattern, _, _ in _NUMBERED)
    )


def uncovered(directory: Path, checkpoint_dirs: Collection[CheckpointDir]) -> tuple[str, ...]:
    """Return the names in an output directory that are in none of its ``checkpoint_dirs``.

    They are sorted within their directory. A directory's name ends in a slash; one that holds a
    checkpoint is replaced by its other content. Spools are left out; () if ``directory`` is a
    checkpoint. Raises as `find_checkpoint_dirs`.
    """
    whole = {
        checkpoint_dir.path for checkpoint_dir in checkpoint_dirs if checkpoint_dir.only is None
    }
    single = {
        checkpoint_dir.path / name
        for checkpoint_dir in checkpoint_dirs
        for name in checkpoint_dir.only or ()
    }

    def below(folder: Path, prefix: str) -> Iterator[str]:
        """Yield the uncovered names below a folder, each after ``prefix``."""
        for entry in sorted(_entries(folder), key=attrgetter("name")):
            path, is_folder = folder / entry.name, entry.is_dir(follow_symlinks=False)
            if entry.name in _NO_CHECKPOINT or path in whole or path in single:
                continue
            if is_folder and any(path in each.parents for each in (*whole, *single)):
                yield from below(path, f"{prefix}{entry.name}/")
            else:
                yield f"{prefix}{entry.name}{'/' if is_folder else ''}"

    return () if directory in whole else tuple(below(directory, ""))


def find_strays(output_dir: Path) -> dict[str, str]:
    """Return the paths of weights that are in no checkpoint, each with a file that shows it.

    A path is that of a directory or a file, relative to the output directory. At most
    `_MOST_STRAYS` directories are searched, one level deep; those whose names begin with ``_`` or
    ``.``, or that have a spool (another output directory), are not. Of files beside checkpoints
    only foreign formats count. Raises as `find_checkpoint_dirs`.
    """
    strays: dict[str, str] = {}
    folders = []
    for name in uncovered(output_dir, find_checkpoint_dirs(output_dir)):
        base = name.rstrip("/").rpartition("/")[2]
        if not name.endswith("/") and _FOREIGN.fullmatch(base):
            strays[name] = base
        elif name.rstrip("/") in NESTED:
            inside = _entries(output_dir / base)
            strays |= {f"{name}{e.name}": e.name for e in inside if _FOREIGN.fullmatch(e.name)}
            folders += [f"{name}{entry.name}" for entry in inside if _is_own_folder(entry)]
        elif name.endswith("/") and not base.startswith(("_", ".")):
            folders.append(name.rstrip("/"))
    for name in folders[:_MOST_STRAYS]:
        if shown := _shown_weights(output_dir / name):
            strays[name] = shown
    return strays


def _shown_weights(folder: Path) -> str:
    """Return the relative path of a file of weights in a directory or one level below, else "".

    At most `_MOST_STRAYS` directories below are searched. "" if the directory has a spool. Raises
    as `_entries`.
    """
    entries = _entries(folder)
    inner = [entry for entry in entries if _is_own_folder(entry)][:_MOST_STRAYS]
    if any(entry.name == SPOOL for entry in entries):
        return ""
    below = (
        f"{e.name}/{entry_below.name}" for e in inner for entry_below in _entries(folder / e.name)
    )
    names = (*(entry.name for entry in entries), *below)
    return next((n for n in names if _SHOWS_WEIGHTS.fullmatch(n.rpartition("/")[2])), "")


def output_dirs_of(path: Path) -> Iterator[tuple[Path, CheckpointDir]]:
    """Yield the output directories in which a worker would find the checkpoint at ``path``.

    The nearest above comes first, ``path`` itself (with a final model in it) last; each is yielded
    with the checkpoint as it is found there. Lazy. Raises as `find_checkpoint_dirs`.
    """
    parent = path.parent
    above = [parent]
    if holds_checkpoints(parent.name):
        above.append(parent.parent)
    if (
        parent.name == "checkpoints"
        and _VERSION.fullmatch(parent.parent.name)
        and parent.parent.parent.name == "lightning_logs"
    ):
        above.append(parent.parent.parent.parent)
    for home in (*above, path):
        for checkpoint_dir in find_checkpoint_dirs(home):
            if checkpoint_dir.only is None:
                is_at_path = checkpoint_dir.path == path
            else:
                is_at_path = (
                    home == path
                    if checkpoint_dir.family == FINAL
                    else checkpoint_dir.path / checkpoint_dir.only[0] == path
                )
            if is_at_path:
                yield home, checkpoint_dir


def checkpoint_name(home: Path, path: Path) -> str:
    """Return the name that the checkpoint at ``path`` has in the output directory ``home``.

    It follows from the path alone, so that the checkpoint need not exist. Raises ValueError if
    ``path`` is not below ``home``.
    """
    above, name = path.relative_to(home).parts[:-1], path.name
    if name.endswith(_LIGHTNING):
        return _lightning(f"{above[1]}.{name}" if len(above) == 3 else name)
    is_numbered = any(pattern.fullmatch(name) for pattern, _, _ in _NUMBERED)
    prefix = _prefix(above[0]) if above and _searched_family(above[0]) else ""
    return prefix + name if is_numbered else _tag_name(prefix, name)


def family_of(name: str) -> Family:
    """Return the family whose checkpoints have such names; DeepSpeed's if no other fits.

    A DeepSpeed tag may be any name. A number after the last dot decides, too:
    ``run-1.checkpoint-5``.
    """
    if name == FINAL:
        return "final"
    if name.endswith(_LIGHTNING):
        return "lightning"
    names = (name, name.rpartition(".")[2])  # the second where what is above it comes before
    return next(
        (family for pattern, family, _ in _NUMBERED if any(map(pattern.fullmatch, names))),
        "deepspeed",
    )


@lru_cache(1 << 12)  # all runs have similar names
def series_and_step(name: str) -> tuple[str, int | None]:
    """Return the part of a name that all saves of one series share, and the step in the name.

    The step is the number at the end; in Lightning's names, the number after ``step-``. It is None
    if there is none: a date, as in Ray's names, comes from a clock.
    """
    if name.endswith(_LIGHTNING):
        version, match = _VERSION.match(name), _STEP_OF_LIGHTNING.search(name)
        return version[0] if version else "", _number(match)
    match = None if _RAY.fullmatch(name) else _STEP.search(name)
    return name[: match.start()] if match else name, _number(match)


def _number(match: re.Match[str] | None) -> int | None:
    """Return the first group of a match as a number, None without a match."""
    return int(match[1]) if match else None


def _checkpoint_of(folder: Path, entry: os.DirEntry[str], above: str) -> CheckpointDir | None:
    """Return the checkpoint that an entry of a folder is, or None; ``above`` comes before its name.

    A directory must be one by `_checkpoint_dir`, a file end in ``.ckpt``. None for links, and for
    names that begin with ``_`` or ``.``.
    """
    name = entry.name
    if _is_own_folder(entry):
        return _checkpoint_dir(folder, name, above)
    # Lightning's checkpoint of one file: no directory is its own
    if name.endswith(_LIGHTNING) and name[0] not in "_." and entry.is_file(follow_symlinks=False):
        return CheckpointDir(_lightning(above + name), "lightning", folder, (name,))
    return None


def _checkpoint_dir(parent: Path, name: str, above: str = "") -> CheckpointDir | None:
    """Return the checkpoint that a directory is, or None; ``above`` comes before its name.

    It is one by a numbered name (of some families, with a typical file in it), by ``.ckpt`` if it
    is not empty, or by DeepSpeed's files in it. Raises as `_entries`.
    """
    path = parent / name
    for pattern, family, inside in _NUMBERED:
        if pattern.fullmatch(name) and (inside is None or _holds(path, inside)):
            return CheckpointDir(above + name, family, path)
    if name.endswith(_LIGHTNING) and _holds(path, _ANYTHING):
        return CheckpointDir(_lightning(above + name), "lightning", path)
    return (
        CheckpointDir(_tag_name(above, name), "deepspeed", path) if _holds(path, _STATES) else None
    )


def _final(output_dir: Path, entries: Collection[os.DirEntry[str]]) -> CheckpointDir | None:
    """Return the final model in a run's root, with the names of its files alone, or None.

    None without weights, or if the output directory has the name of a checkpoint.
    """
    if any(pattern.fullmatch(output_dir.name) for pattern, _, _ in _NUMBERED):
        return None
    names = final_names(output_dir, entries)
    return CheckpointDir(FINAL, "final", output_dir, names) if names else None


def final_names(output_dir: Path, entries: Collection[os.DirEntry[str]]) -> tuple[str, ...]:
    """Return the sorted names of a final model's files and directories; () if there are no weights.

    ``entries``: all of ``output_dir``. The directories are peft's adapters that are not called
    ``default``. A link with a model's name counts, but not as weights. Raises as `_entries`.
    """
    files = [
        e for e in entries if OF_MODEL.fullmatch(e.name) and not e.is_dir(follow_symlinks=False)
    ]
    adapters = [
        e.name
        for e in entries
        if _is_own_folder(e)
        and not (holds_checkpoints(e.name) or is_ours(e.name) or is_named_like_one(e.name))
        and _holds(output_dir / e.name, _ADAPTER)
    ]
    weights = (e for e in files if e.name.endswith((".safetensors", ".bin")))
    if not adapters and not any(
        WEIGHTS.fullmatch(e.name) and e.is_file(follow_symlinks=False) for e in weights
    ):
        return ()
    return tuple(sorted([*(e.name for e in files), *adapters]))


def _holds(path: Path, pattern: re.Pattern[str]) -> bool:
    """Return whether a directory has any entry with such a name. Raises as `_entries`."""
    return any(pattern.fullmatch(entry.name) for entry in _entries(path))


def _tag_name(above: str, tag: str) -> str:
    """Return the name of a DeepSpeed tag in a directory whose names get ``above`` before them.

    A tag that was downloaded has it already.
    """
    return _plain(tag if tag.startswith(above) else above + tag)


def _plain(tag: str) -> str:
    """Return a DeepSpeed tag as one component of a store's names.

    A tag that cannot be one keeps its letters and gets a digest.
    """
    return tag if is_plain_name(tag) and tag != FINAL else _tagged(tag)


def _tagged(tag: str) -> str:
    """Return a plain name made of the letters of ``tag`` and its digest."""
    # imported here: a training's environment may lack blake3, and few names need a digest
    from ckptsync.digest import digest  # noqa: PLC0415

    return f"tag-{re.sub(r'[^A-Za-z0-9_.-]', '_', tag)[:80]}.{digest(os.fsencode(tag))[:8]}"


def _lightning(name: str) -> str:
    """Return ``epoch=3-step=40.ckpt`` as ``epoch-3-step-40.ckpt``.

    If even that is no plain name, it gets a digest.
    """
    plain = name.replace("=", "-")
    return plain if _PLAIN.fullmatch(plain) else _tagged(name) + _LIGHTNING


def _candidates(entries: Iterable[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    """Return the entries that may be a checkpoint or hold one, sorted by name."""
    candidates = (
        e for e in entries if e.is_dir(follow_symlinks=False) or e.name.endswith(_LIGHTNING)
    )
    return sorted(candidates, key=attrgetter("name"))


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a directory whose name does not begin with ``_`` or ``.``."""
    return not entry.name.startswith(("_", ".")) and entry.is_dir(follow_symlinks=False)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """Return the entries of a directory: none if it has vanished.

    Raises ConfigError if it may not be read, StoreError if the disk fails.
    """
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile, for example by rotation
        return []
    except PermissionError as e:
        raise ConfigError(
            f"{path}: may not be read by uid {os.geteuid()}",
            hint="run the worker as the user who trains",
        ) from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}") from e
