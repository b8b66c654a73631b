"""What trains on this node: the facts of its Python, and the settings in its own file.

The training's Python may have none of our libraries, so `ask_python` runs `ckptsync.doctor.probe`
in it as a script.  `read_training` reads the training's configuration or launch script, of which
only the keys in `KEYS` are returned, and no URLs.
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
    """Return the Python of the active environment; if none is active, PATH's first and our own."""
    active = [
        Path(environment[name], "bin", "python")
        for name in ("VIRTUAL_ENV", "CONDA_PREFIX")
        if environment.get(name)
    ]
    if python_path := next((str(path) for path in active if path.exists()), None):
        return (python_path,)
    first = shutil.which("python3", path=environment.get("PATH"))
    return tuple(dict.fromkeys(python for python in (first, sys.executable) if python))


def ask_first(
    pythons: Sequence[str], environment: Mapping[str, str], **arguments: Any
) -> dict[str, Any]:
    """Return the facts of the first Python that has torch, or of the first if none has.

    Each is run in turn until one has it.  ``arguments`` are those of `probe.gather`.  Raises
    ConfigError if one of these cannot be run.
    """
    facts = ask_python(pythons[0], environment, **arguments)
    if facts["versions"].get("torch"):
        return facts
    answers = (ask_python(python, environment, **arguments) for python in pythons[1:])
    return next((answer for answer in answers if answer["versions"].get("torch")), facts)


def ask_python(python: str, environment: Mapping[str, str], **arguments: Any) -> dict[str, Any]:
    """Return what `probe.gather` returns in another Python.

    ``environment`` is that Python's; ``arguments`` are those of `probe.gather`.  Raises ConfigError
    if the Python cannot be run, fails, is silent for `_PATIENCE`, prints something else, or is not
    root's own where this is root.
    """
    program = shutil.which(python, path=environment.get("PATH")) or python
    program_path = os.path.abspath(program)  # noqa: PTH100 - links stay: they name an environment
    check_is_ours(Path(program_path))
    try:
        done = subprocess.run(  # noqa: S603 - the operator names it
            [program_path, "-", json.dumps(arguments)],
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
    """Raise ConfigError if this is root, and another user could change what a Python runs.

    Checks the program, the links and directories on the way to it, its packages, and the files that
    it runs at its start.  Returns at once for any other user.
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
        file
        for program in ways
        for pattern in patterns
        for file in program.parent.parent.glob(pattern)
    }
    for path in sorted({*ways, *inside, *(above for program in ways for above in program.parents)}):
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
    """Return the settings in a training's file: those of `KEYS`, ``zero_stage``, ``gather_16bit``.

    The file may be LLaMA-Factory's YAML, TrainingArguments as JSON, a DeepSpeed or accelerate
    configuration, or the script that launches the training.  Configurations that it names are read,
    too; a script's options override them, and those that cannot be read are skipped.

    Raises ConfigError if the file cannot be read, or a script names no training.
    """
    text = _read(path)
    if not is_script(path.name, text):
        return _texts(_mapping(path, text), path)
    script, settings = read_script(text, environment), dict[str, str]()
    for name in script.files:
        if config_path := _find(name, path):
            with contextlib.suppress(ConfigError):  # data, or the training says what is wrong
                settings |= _texts(_mapping(config_path, _read(config_path)), config_path)
    settings |= _texts(script.options, path)
    if not settings:
        why = f"{path}: this script names no output_dir and no configuration of a training"
        raise ConfigError(why, hint=f"{_TRAINING}, or a script with such options")
    return settings


def output_dir_of(training: Mapping[str, str]) -> str:
    """Return the output directory in a training's settings; "" if it holds shell variables."""
    path = training.get("output_dir", "")
    return "" if {"$", "`"} & {*path} else os.path.expanduser(path)  # noqa: PTH111 - as trainers do


def _texts(values: Mapping[str, Any], path: Path) -> dict[str, str]:
    """Return the settings in a configuration, and in the DeepSpeed configuration that it names.

    Values with a URL are left out.  ``path``: of its file, beside which the other one may lie.
    Raises ConfigError if that one is there and cannot be read.
    """
    texts = {
        key: text for key in KEYS if key in values and "://" not in (text := _text(values[key]))
    }
    inner = values.get("deepspeed")
    if isinstance(inner, str) and inner:
        config_path = _find(inner, path)
        # the training says that it is not there
        inner = _mapping(config_path, _read(config_path)) if config_path else {}
    for config in (values, inner, values.get("deepspeed_config")):
        if isinstance(config, Mapping):
            texts |= dict(_zero(config))
    return texts


def _find(name: str, beside: Path) -> Path | None:
    """Return the file ``name`` in the working directory, else beside another; None if neither."""
    return next((p for p in (Path(name), beside.parent / name) if p.is_file()), None)


def _zero(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield ``zero_stage`` and ``gather_16bit`` (a save gathers the model), if there is ZeRO.

    DeepSpeed's default is not to gather (runtime/zero/config.py).
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
    """Return a file's text.  Raises ConfigError if it cannot be read."""
    try:
        return read_named(path, LIMIT).decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        why = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {why}", hint=_TRAINING) from e


def _mapping(path: Path, text: str) -> dict[str, Any]:
    """Return the values of JSON or YAML.  Raises ConfigError if it is no mapping."""
    try:
        values = plain_json.parse(text, os.fspath(path))
    except Corrupt:
        values = parse(text, os.fspath(path)).values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: not a mapping of keys to values", hint=_TRAINING)
    return {str(key): value for key, value in values.items()}


def _text(value: object) -> str:
    """Return a string, number or boolean as text; "" for anything else."""
    text = str(value) if isinstance(value, (str, int, float)) else ""
    return text.lower() if isinstance(value, bool) else text
