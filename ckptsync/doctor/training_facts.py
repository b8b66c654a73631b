"""What trains here: facts of its Python (`ask_python`), and its file (`read_training`).

The Python may have none of our libraries, and we none of its: `ckptsync.doctor.probe` runs in it as
a script.  Of the training's file only the keys in `KEYS` are read, and no URLs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptsync import plain_json
from ckptsync.config.yaml_lines import LIMIT, parse
from ckptsync.doctor import probe
from ckptsync.doctor.directory_checks import user_name
from ckptsync.doctor.launch_scripts import is_script, read_script
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.safe_open import read_named
from ckptsync.walk import is_private_directory

KEYS = (
    "output_dir",
    "save_on_each_node",
    "finetuning_type",
    "ray_run_name",
    "ray_num_workers",
    "model_name_or_path",
)
_PATIENCE = 120.0  # seconds: a driver that wakes its GPUs takes some
_NAMED = "--python names the Python that trains, 3.8 or newer"
_AS_TRAINER = "run it as the user who trains: sudo -u USER ckptsync doctor …"
_TRAINING = "--training names the training's own YAML or JSON, or its launch script (*.sh)"


def find_pythons(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the Python of the active environment; else the first in PATH, and our own."""
    active = [
        Path(environment[name], "bin", "python")
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX")
        if environment.get(name)
    ]
    if found := next((str(path) for path in active if path.exists()), None):
        return (found,)
    first = shutil.which("python3", path=environment.get("PATH"))
    return tuple(dict.fromkeys(python for python in (first, sys.executable) if python))


def ask_first(
    pythons: Sequence[str], environment: Mapping[str, str], **wanted: Any
) -> dict[str, Any]:
    """Return the facts of the first Python that has torch, or else of the first.

    Raises ConfigError where it cannot be asked.
    """
    facts = ask_python(pythons[0], environment, **wanted)
    if facts["versions"].get("torch"):
        return facts
    others = (ask_python(python, environment, **wanted) for python in pythons[1:])
    return next((other for other in others if other["versions"].get("torch")), facts)


def ask_python(python: str, environment: Mapping[str, str], **wanted: Any) -> dict[str, Any]:
    """Return what `probe.gather` gathers in that Python, which gets this ``environment``.

    Raises ConfigError where it cannot be run, or prints something else; root runs only a Python of
    its own.
    """
    found = shutil.which(python, path=environment.get("PATH")) or python
    named = os.path.abspath(found)  # noqa: PTH100 - links stay: they name an environment
    check_is_ours(Path(named))
    try:
        done = subprocess.run(  # noqa: S603 - the operator names it
            [named, "-", json.dumps(wanted)],
            input=Path(probe.__file__).read_text("utf-8"),
            cwd="/",  # where no module of anybody's lies
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=True,
            env=environment,
        )
        # an environment may print before it
        facts = plain_json.parse((done.stdout.splitlines() or [""])[-1], python)
    except subprocess.CalledProcessError as e:
        last = (e.stderr.strip().splitlines() or ["nothing"])[-1]
        why = f"{python}: failed (exit code {e.returncode}): {last}"
        raise ConfigError(why, hint=_NAMED) from e
    except subprocess.TimeoutExpired as e:
        why = f"{python}: did not answer within {_PATIENCE:g} s"
        raise ConfigError(why, hint=_NAMED) from e
    except OSError as e:
        raise ConfigError(f"{python}: cannot be run: {e.strerror}", hint=_NAMED) from e
    except (ValueError, Corrupt):
        facts = None
    wanted_keys = ("versions", "output_dirs")
    if not isinstance(facts, dict) or not all(isinstance(facts.get(k), dict) for k in wanted_keys):
        hint = f"check what it prints at its start; {_NAMED}"
        raise ConfigError(f"{python}: printed something else than its facts", hint=hint)
    return dict(facts)


def check_is_ours(python: Path) -> None:
    """Raise ConfigError where another user decides what a Python does that root would run.

    The program counts, the links and directories that lead to it, and where it imports from, with
    what it runs at its start.  Other users may run what they like.
    """
    if os.geteuid():
        return
    ways = {python, Path(os.path.realpath(python))}
    if python.is_symlink():
        ways.add(python.parent / python.readlink())
    packages = "lib*/python3*/*-packages"
    started = (f"{packages}/*.pth", f"{packages}/*customize.py", "lib*/python3*/*customize.py")
    patterns = ("pyvenv.cfg", "lib*", "lib*/python3*", packages, *started)
    inside = {
        found for way in ways for pattern in patterns for found in way.parent.parent.glob(pattern)
    }
    for path in sorted({*ways, *inside, *(above for way in ways for above in way.parents)}):
        try:
            info = path.lstat()
        except FileNotFoundError:  # running it says so
            continue
        why, hint = "", _AS_TRAINER
        if info.st_uid:
            why = f"{path} is {user_name(info.st_uid)}'s"
        elif (stat.S_ISDIR(info.st_mode) and not is_private_directory(info)) or (
            stat.S_ISREG(info.st_mode) and info.st_mode & stat.S_IWOTH
        ):
            why, hint = f"others may write to {path}", f"chmod o-w {path}, or {_AS_TRAINER}"
        if why:
            raise ConfigError(f"{python}: root does not run it: {why}", hint=hint)


def read_training(path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return texts by key, with ``zero_stage`` and ``gather_16bit``.

    Raises ConfigError where the file cannot be read.

    The file may be LLaMA-Factory's YAML, TrainingArguments as JSON, a DeepSpeed or accelerate
    configuration, or the script that launches the training.  Configurations that it names are read
    too.
    """
    text = _read(path)
    if not is_script(path.name, text):
        return _texts(_mapping(path, text), path)
    script, texts = read_script(text, environment), dict[str, str]()
    for name in script.files:
        if there := _find(name, path):
            with contextlib.suppress(ConfigError):  # data, or the training says what is wrong
                texts |= _texts(_mapping(there, _read(there)), there)
    texts |= _texts(script.options, path)
    if not texts:
        why = f"{path}: this script names no output_dir and no configuration of a training"
        raise ConfigError(why, hint=f"{_TRAINING}, or a script with such options")
    return texts


def output_dir_of(given: Mapping[str, str]) -> str:
    """Return the output directory that a training's file names; empty where a shell decides."""
    path = given.get("output_dir", "")
    return "" if {"$", "`"} & {*path} else os.path.expanduser(path)  # noqa: PTH111 - as trainers do


def _texts(given: Mapping[str, Any], path: Path) -> dict[str, str]:
    texts = {key: text for key in KEYS if key in given and "://" not in (text := _text(given[key]))}
    inner = given.get("deepspeed")
    if isinstance(inner, str) and inner:
        there = _find(inner, path)
        # the training says that it is not there
        inner = _mapping(there, _read(there)) if there else {}
    for config in (given, inner, given.get("deepspeed_config")):
        if isinstance(config, Mapping):
            texts |= dict(_zero(config))
    return texts


def _find(name: str, beside: Path) -> Path | None:
    """Return the file of that name, as the training or the file that names it finds it."""
    return next((p for p in (Path(name), beside.parent / name) if p.is_file()), None)


def _zero(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield ZeRO's stage, and whether it gathers the model when it saves.

    Without the key DeepSpeed does not (runtime/zero/config.py).
    """
    zero = config.get("zero_optimization")
    if isinstance(zero, Mapping):
        yield "zero_stage", _text(zero.get("stage", ""))
        names = (
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        )
        yield "gather_16bit", _text(next((zero[name] for name in names if name in zero), False))
    elif "zero_stage" in config:  # accelerate's own words
        yield "zero_stage", _text(config["zero_stage"])
        yield "gather_16bit", _text(config.get("zero3_save_16bit_model", False))


def _read(path: Path) -> str:
    try:
        return read_named(path, LIMIT).decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {why}", hint=_TRAINING) from e


def _mapping(path: Path, text: str) -> dict[str, Any]:
    try:
        values = plain_json.parse(text, os.fspath(path))
    except Corrupt:
        values = parse(text, os.fspath(path)).values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a mapping of keys to values", hint=_TRAINING)
    return {str(key): value for key, value in values.items()}


def _text(value: object) -> str:
    text = str(value) if isinstance(value, (str, int, float)) else ""
    return text.lower() if isinstance(value, bool) else text
