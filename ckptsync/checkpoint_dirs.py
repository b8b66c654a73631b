"""Find the checkpoints in an output directory, whoever wrote them.

A scan is the truth; events only say when to scan.

A name in a store follows from the path alone, so that every node and every scan gives the same one.
Where trainers write, and what, was read in their sources and seen in real runs: transformers 5.23,
accelerate 1.15, DeepSpeed 0.19.8, torchtitan 0.3, verl 0.9.1, Lightning 2.6.6, LLaMA-Factory 0.9.5,
Ray Train 2.60.
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

Family = Literal["trainer", "accelerate", "deepspeed", "dcp", "verl", "lightning", "final"]
FINAL = "final"  # the model that a trainer leaves beside its checkpoints when it is done
ASIDE = "_ckptsync-aside"
"""The directory of an output directory into which `ckptsync resume` moves checkpoints aside."""
# accelerate's projects, torchtitan's dump folder, Lightning under most loggers
NESTED = ("checkpoints", "checkpoint")
# of a rank's own; of its experts; of a pipeline's layers: a node may hold those of one kind alone
_STATES = re.compile(
    r"(bf16_|fp16_)?(zero_pp_rank_[0-9]+_|expp_rank_[0-9]+_|(layer_[0-9]+_)?expert_[0-9]+_)?mp_rank_[0-9]+_(model|optim)_states\.pt"
    r"|layer_[0-9]+(-model_[0-9]+)?-model_states\.pt"
)
_DCP = re.compile(
    r"\.metadata|__[0-9]+_[0-9]+\.distcp|.+\.safetensors(\.index\.json)?"
    r"|metadata\.pkl|(model|optimizer)_[0-9]+\.pt"  # torch_checkpointing's
)
# of its PPO trainer; of its SFT trainer, which has no directory for its one model
_VERL = re.compile(
    r"actor|critic|model|optimizer|extra|dist_ckpt|huggingface|data(_[0-9]+)?\.pt"
    r"|(model|optim|extra_state)_world_size_[0-9]+_rank_[0-9]+\.pt|.+\.safetensors"
)
_ANYTHING = re.compile(r".*", re.DOTALL)
# Ray Train's names are dates
_RAY = re.compile(
    r"checkpoint_[0-9]{4}-[0-9][0-9]-[0-9][0-9]_[0-9][0-9]-[0-9][0-9]-[0-9][0-9]\.[0-9]{6}",
    re.ASCII,
)
# by its name, and by a name of something in it where a directory of that name may be anything
_NUMBERED: tuple[tuple[re.Pattern[str], Family, re.Pattern[str] | None], ...] = (
    (re.compile(r"checkpoint-[0-9]{1,18}"), "trainer", None),
    (re.compile(r"checkpoint_[0-9]{1,18}"), "accelerate", None),
    (_RAY, "accelerate", None),  # whatever is in it
    (re.compile(r"step-[0-9]{1,18}"), "dcp", _DCP),
    (re.compile(r"iter_[0-9]{7,18}"), "dcp", _DCP),  # Megatron-Core
    (re.compile(r"global_step_[0-9]{1,18}"), "verl", _VERL),
)
_LIGHTNING = ".ckpt"  # a file, or the directory of a sharded one
_VERSION = re.compile(r"version_[0-9]{1,9}")
_STEP = re.compile(r"(?<![0-9])([0-9]{1,18})\Z")
_STEP_OF_LIGHTNING = re.compile(r"step-([0-9]{1,18})")
_SECOND = re.compile(r"\.\d+$")  # ends the names of further checkpoints of one name, aside
_SEARCHED = re.compile(r"run-[A-Za-z0-9_-]{1,60}")  # a trial of Trainer.hyperparameter_search
# a spool, and the records of a store that somebody copied by hand
_NO_CHECKPOINT = (SPOOL, RECORDS)
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

WEIGHTS = re.compile(
    r"((adapter_)?model(-[0-9]{5}-of-[0-9]{5})?\.safetensors)|((pytorch|adapter)_model(-[0-9]{5}-of-[0-9]{5})?\.bin)"
)
_ADAPTER = re.compile(r"adapter_model\.(safetensors|bin)")
# A model's own files, and what a trainer says of it when it is done.  Logs lie there, too: they
# grow while nothing else does.
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
_MOST_STRAYS = 200  # directories that are looked into


@dataclass(frozen=True, slots=True)
class CheckpointDir:
    """Where a checkpoint lies. ``name`` is its location in a store: one plain path component.

    ``only``: the names in ``path`` that belong to it, where it has no directory of its own.
    """

    name: str
    family: Family
    path: Path
    only: tuple[str, ...] | None = None

    @property
    def step(self) -> int | None:
        """The step in the name; of Ray's all of the date."""
        if _RAY.fullmatch(self.name):
            return int(re.sub(r"\D", "", self.name))
        return series_and_step(self.name)[1]


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint as it lies on disk at this moment.

    `ckptsync.walk.Listing` says what is and is not counted.
    """

    name: str
    family: Family
    path: Path
    files: tuple[Stat, ...]
    partial: tuple[Stat, ...]
    others: tuple[str, ...]


def list_checkpoint(checkpoint_dir: CheckpointDir) -> ListedCheckpoint:
    """Return the files of a checkpoint as they are now; one that has vanished has none."""
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
    """Return the name in `ASIDE` → the checkpoint's name, and its files, of what was moved aside.

    Paths of files are relative to the checkpoint.  Raises ConfigError where they may not be listed.
    """
    files: dict[str, list[Stat]] = {}
    for file in walk(output_dir / ASIDE).files:
        name, _, rest = file.path.partition("/")
        files.setdefault(name, []).append(replace(file, path=rest or name))
    return {name: (_SECOND.sub("", name), tuple(its)) for name, its in files.items()}


def find_checkpoint_dirs(output_dir: Path) -> tuple[CheckpointDir, ...]:
    """Return where checkpoints lie, without looking into them further than to know their family."""
    entries = _entries(output_dir)  # once: 100,000 files of somebody else's may lie there
    candidates = _candidates(entries)
    found: dict[str, CheckpointDir] = {}
    for folder, above, families in _searched_folders(output_dir, candidates):
        is_top = folder == output_dir
        for entry in candidates if is_top else _candidates(_entries(folder)):
            one = _checkpoint_of(folder, entry, above)
            if one and one.family in families and not (is_top and entry.name in NESTED):
                name = _second_name(one, output_dir) if one.name in found else one.name
                found[name] = replace(one, name=name)
        if is_top and (final := _final(output_dir, entries)):
            found[FINAL] = final
    return tuple(found[name] for name in sorted(found))


def _searched_folders(
    output_dir: Path, entries: Iterable[os.DirEntry[str]]
) -> Iterator[tuple[Path, str, Collection[str]]]:
    """Yield folders that may hold checkpoints, what stands before their names, and the families."""
    everything = get_args(Family)
    yield output_dir, "", everything
    inside = {e.name for e in entries if _is_own_folder(e)}
    for name in (name for name in NESTED if name in inside):
        yield output_dir / name, "", [family for family in everything if family != "deepspeed"]
    for name in sorted(filter(_SEARCHED.fullmatch, inside)):
        yield output_dir / name, f"{name}.", ["trainer"]
    logs = output_dir / "lightning_logs"
    for entry in _candidates(_entries(logs)) if logs.name in inside else ():
        saved = logs / entry.name / "checkpoints"
        if _VERSION.fullmatch(entry.name) and _is_own_folder(entry) and not saved.is_symlink():
            yield saved, f"{entry.name}.", ["lightning"]


def _second_name(one: CheckpointDir, output_dir: Path) -> str:
    """Return the name of the second checkpoint of one name: its path."""
    parts = (*one.path.relative_to(output_dir).parts, *(one.only or ()))
    if one.family == "lightning":
        return _tagged("/".join(parts)) + _LIGHTNING
    return ".".join(parts)


def checkpoint_dir_at(directory: Path) -> CheckpointDir | None:
    """Return ``directory`` itself as a checkpoint, or ``None`` if nothing says that it is one."""
    path = directory.resolve()
    return _checkpoint_dir(path.parent, path.name)


def is_plain_name(name: str) -> bool:
    """Return whether a store can keep a checkpoint under this very name."""
    is_taken = name in NESTED or name.casefold() == LOGS or is_ours(name)
    return bool(_PLAIN.fullmatch(name)) and not is_taken


def is_named_like_one(name: str) -> bool:
    """Return whether a name begins as a checkpoint's does, such as ``checkpoint-4 (copy)``."""
    return any(
        found and not name[found.end() :][:1].isdigit()
        for found in (pattern.match(name) for pattern, _, _ in _NUMBERED)
    )


def uncovered(directory: Path, found: Collection[CheckpointDir]) -> tuple[str, ...]:
    """List what lies in an output directory and is in none of the checkpoints ``found``.

    A directory's name ends in a slash.
    """
    whole = {one.path for one in found if one.only is None}
    single = {one.path / name for one in found for name in one.only or ()}

    def below(folder: Path, prefix: str) -> Iterator[str]:
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
    """Return directories and files with weights that are in no checkpoint of an output directory.

    By path below the output directory, each with a file that shows it: in a directory, or one level
    below.  Other output directories are left out where a worker or a hook has made a spool.
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
    """Return a file of weights in a directory or one level below; empty if there is none."""
    entries = _entries(folder)
    inner = [entry for entry in entries if _is_own_folder(entry)][:_MOST_STRAYS]
    if any(entry.name == SPOOL for entry in entries):
        return ""
    below = (f"{e.name}/{one.name}" for e in inner for one in _entries(folder / e.name))
    names = (*(entry.name for entry in entries), *below)
    return next((n for n in names if _SHOWS_WEIGHTS.fullmatch(n.rpartition("/")[2])), "")


def output_dirs_of(path: Path) -> Iterator[tuple[Path, CheckpointDir]]:
    """Yield every output directory in which a worker would find the checkpoint at ``path``.

    The nearest comes first, each with what the checkpoint is there. Raises as
    `find_checkpoint_dirs` does.
    """
    parent = path.parent
    above = [parent]
    if parent.name in NESTED or _SEARCHED.fullmatch(parent.name):
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
                is_at = checkpoint_dir.path == path
            else:
                is_at = (
                    home == path
                    if checkpoint_dir.family == FINAL
                    else checkpoint_dir.path / checkpoint_dir.only[0] == path
                )
            if is_at:
                yield home, checkpoint_dir


def checkpoint_name(home: Path, path: Path) -> str:
    """Return the name of a checkpoint at ``path``, below ``home``, once it has files."""
    above, name = path.relative_to(home).parts[:-1], path.name
    if name.endswith(_LIGHTNING):
        return _lightning(f"{above[1]}.{name}" if len(above) == 3 else name)
    is_numbered = any(pattern.fullmatch(name) for pattern, _, _ in _NUMBERED)
    trial = f"{above[0]}." if above and _SEARCHED.fullmatch(above[0]) else ""
    return trial + (name if is_numbered else _plain(name))


def family_of(name: str) -> Family:
    """Return whose checkpoint has such a name; a tag may have any."""
    if name == FINAL:
        return "final"
    if name.endswith(_LIGHTNING):
        return "lightning"
    names = (name, name.rpartition(".")[2])  # the second where what is above it comes before
    return next(
        (family for pattern, family, _ in _NUMBERED if any(map(pattern.fullmatch, names))),
        "deepspeed",
    )


@lru_cache(1 << 12)  # those of all runs are alike
def series_and_step(name: str) -> tuple[str, int | None]:
    """Return what names of one series of saves have in common, and the step in a name.

    The step is the number at its end; of Lightning's the one that says that it is a step.  None if
    there is none: a date, as in Ray's names, is what a clock said, and no step.
    """
    if name.endswith(_LIGHTNING):
        version, found = _VERSION.match(name), _STEP_OF_LIGHTNING.search(name)
        return version[0] if version else "", _number(found)
    found = None if _RAY.fullmatch(name) else _STEP.search(name)
    return name[: found.start()] if found else name, _number(found)


def _number(found: re.Match[str] | None) -> int | None:
    return int(found[1]) if found else None


def _checkpoint_of(folder: Path, entry: os.DirEntry[str], above: str) -> CheckpointDir | None:
    """Return the checkpoint that an entry of a folder is, if it is one."""
    name = entry.name
    if _is_own_folder(entry):
        return _checkpoint_dir(folder, name, above)
    # Lightning's checkpoint of one file: no directory is its own
    if name.endswith(_LIGHTNING) and name[0] not in "_." and entry.is_file(follow_symlinks=False):
        return CheckpointDir(_lightning(above + name), "lightning", folder, (name,))
    return None


def _checkpoint_dir(parent: Path, name: str, above: str = "") -> CheckpointDir | None:
    """Return a directory that is a checkpoint; ``above`` comes before its name."""
    path = parent / name
    for pattern, family, inside in _NUMBERED:
        if pattern.fullmatch(name) and (inside is None or _holds(path, inside)):
            return CheckpointDir(above + name, family, path)
    if name.endswith(_LIGHTNING) and _holds(path, _ANYTHING):
        return CheckpointDir(_lightning(above + name), "lightning", path)
    return CheckpointDir(_plain(name), "deepspeed", path) if _holds(path, _STATES) else None


def _final(output_dir: Path, entries: Collection[os.DirEntry[str]]) -> CheckpointDir | None:
    """The model in a run's root, without what else lies there.

    A checkpoint that somebody gives as a run has no root.
    """
    if any(pattern.fullmatch(output_dir.name) for pattern, _, _ in _NUMBERED):
        return None
    names = final_names(output_dir, entries)
    return CheckpointDir(FINAL, "final", output_dir, names) if names else None


def final_names(output_dir: Path, entries: Collection[os.DirEntry[str]]) -> tuple[str, ...]:
    """Return the names of a final model's files and directories; empty without its weights.

    peft saves adapters that are not called ``default`` in directories of their names.
    """
    files = [
        e for e in entries if OF_MODEL.fullmatch(e.name) and not e.is_dir(follow_symlinks=False)
    ]
    adapters = [
        e.name
        for e in entries
        if _is_own_folder(e)
        and not (
            e.name in NESTED
            or is_ours(e.name)
            or _SEARCHED.fullmatch(e.name)
            or is_named_like_one(e.name)
        )
        and _holds(output_dir / e.name, _ADAPTER)
    ]
    weights = (e for e in files if e.name.endswith((".safetensors", ".bin")))
    if not adapters and not any(
        WEIGHTS.fullmatch(e.name) and e.is_file(follow_symlinks=False) for e in weights
    ):
        return ()
    return tuple(sorted([*(e.name for e in files), *adapters]))


def _holds(path: Path, pattern: re.Pattern[str]) -> bool:
    return any(pattern.fullmatch(entry.name) for entry in _entries(path))


def _plain(tag: str) -> str:
    """A tag as one component of a store's names.

    A tag that is none keeps its letters and gets a digest.
    """
    return tag if is_plain_name(tag) and tag != FINAL else _tagged(tag)


def _tagged(tag: str) -> str:
    from ckptsync.digest import (  # noqa: PLC0415
        digest,
    )  # a training's environment may have nothing that digests; few names want one

    return f"tag-{re.sub(r'[^A-Za-z0-9_.-]', '_', tag)[:80]}.{digest(os.fsencode(tag))[:8]}"


def _lightning(name: str) -> str:
    """``epoch=3-step=40.ckpt`` as ``epoch-3-step-40.ckpt``.

    What is no plain name even so gets a digest.
    """
    plain = name.replace("=", "-")
    return plain if _PLAIN.fullmatch(plain) else _tagged(name) + _LIGHTNING


def _candidates(entries: Iterable[os.DirEntry[str]]) -> list[os.DirEntry[str]]:
    """Return by name what may be a checkpoint, or hold one."""
    found = (e for e in entries if e.is_dir(follow_symlinks=False) or e.name.endswith(_LIGHTNING))
    return sorted(found, key=attrgetter("name"))


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(("_", ".")) and entry.is_dir(follow_symlinks=False)


def _entries(path: Path) -> list[os.DirEntry[str]]:
    """Return what lies in a directory; nothing where it has vanished.

    Entries say what they are at no cost, of thousands of files, too.
    """
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except (
        FileNotFoundError,
        NotADirectoryError,
    ):  # rotation is quicker than we are, and that is its right
        return []
    except PermissionError as e:
        raise ConfigError(
            f"{path}: may not be read by uid {os.geteuid()}",
            hint="run the worker as the user who trains",
        ) from e
    except OSError as e:
        raise StoreError(f"{path}: {e.strerror}") from e
