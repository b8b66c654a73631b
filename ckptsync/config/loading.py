"""File and environment → `Config`: every problem is found before one `ConfigError` names them all.

Order: a default, then the file, then ``CKPTSYNC_*`` (the table in `settings` says which).
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsync.config.settings import SECTIONS, SETTINGS
from ckptsync.config.values import (
    AlertsConfig,
    Config,
    HeadConfig,
    LimitsConfig,
    LogConfig,
    MetricsConfig,
    RetentionConfig,
    StoreConfig,
    VerifyConfig,
    WorkerConfig,
)
from ckptsync.config.yaml_lines import LIMIT, Document, parse
from ckptsync.errors import ConfigError
from ckptsync.spool import folders
from ckptsync.stores.urls import located
from ckptsync.walk import UnsafeSpool, split

_HIDDEN = "***"
_OPTIONS = SETTINGS["store.options"].environment


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """The configuration in a file, with the environment's overrides; raises ConfigError with every problem."""
    try:
        text = _content(path).decode()
    except UnsafeSpool:
        raise
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        raise ConfigError(
            f"{path}: cannot be read: {reason}",
            hint="give a configuration file with -c; `ckptsync config example worker` prints one, also head and both",
        ) from e
    return read(text, str(path), environment)


def _content(path: Path) -> bytes:
    """Of a file that a hook wrote into a spool for its own worker, only what is this user's alone there.  Raises OSError."""
    if not split(path)[1]:
        with path.open("rb") as file:
            return file.read(LIMIT + 1)
    found = folders.read(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no file of this user's", str(path))
    return found


def from_environment(environment: Mapping[str, str] = os.environ) -> tuple[dict[str, object], LimitsConfig]:
    """The store's options and the limits where no configuration is given; raises ConfigError with every problem."""
    problems: list[str] = []
    keys = [key for key in SETTINGS if key == "store.options" or key.startswith("limits.")]
    ours = {name: value for name, value in environment.items() if name == _OPTIONS or name.startswith("CKPTSYNC_LIMITS_")}
    given = dict(_overrides(ours, problems))
    values = {key: _value(key, *given.get(key, ("", None)), problems) for key in keys}
    if problems:
        raise ConfigError(_all("environment", problems), hint="`ckptsync help cli` says what each variable wants")
    return values.pop("store.options"), LimitsConfig(**{key.partition(".")[2]: value for key, value in values.items()})


def read(text: str, name: str, environment: Mapping[str, str]) -> Config:
    """Pure: as `load`, of a file's text."""
    document = parse(text, name)
    problems = [f"{_at(name, document, key)}: given twice" for key in document.twice]
    given: dict[str, tuple[str, object]] = {}
    for key, where, value in _flat(document, name, problems):
        given[key] = where, value
    overrides = dict(_overrides(environment, problems))
    in_file, given = given, given | overrides
    values = {key: _value(key, *given.get(key, ("", None)), problems) for key in SETTINGS}
    problems += _wants(values, name, known=set(given))
    if problems:
        raise ConfigError(_all(name, problems), hint="`ckptsync config example worker` prints every key, also head and both")
    return _config(values, tuple(_overridden(in_file, overrides, values)))


def shown_url(url: str) -> str:
    """A store's URL for a message: one that cannot be a store's may have a password in it."""
    try:
        located(url)
    except ConfigError:
        return _HIDDEN
    return url


def _overridden(
    in_file: Mapping[str, tuple[str, object]], overrides: Mapping[str, tuple[str, object]], values: Mapping[str, Any]
) -> Iterator[str]:
    """A line for each key of the file that a variable gives another value."""
    for key in (key for key in in_file if key in overrides):
        (where, old), (variable, new) = in_file[key], overrides[key]
        if _value(key, where, old, []) != values[key]:
            yield f"{where}: {_shown(key, old)} is overridden by {variable}={_shown(key, new)}"


def _shown(key: str, value: object) -> str:
    if SETTINGS[key].is_secret:
        return _HIDDEN
    return shown_url(str(value)) if key == "store.url" else f"{value!s:.200}"


def _flat(document: Document, name: str, problems: list[str]) -> Iterator[tuple[str, str, object]]:
    """``(key, where, value)`` of every known key; unknown ones become problems."""
    if document.values is None:
        return
    if not isinstance(document.values, dict):
        problems.append(f"{name}: not a mapping of keys to values")
        return
    for top, value in document.values.items():
        if top in SECTIONS and value is None:
            continue  # a section whose keys are all commented out
        if top in SECTIONS and not isinstance(value, dict):
            problems.append(f"{_at(name, document, top)}: {value!r} is not a mapping{_sections_hint(top)}")
            continue
        items = {f"{top}.{key}": v for key, v in value.items()} if top in SECTIONS else {str(top): value}
        for key, item in items.items():
            if key in SETTINGS:
                yield key, _at(name, document, key), item
            else:
                problems.append(f"{_at(name, document, key)}: unknown key{_suggestion(key)}")


def _overrides(environment: Mapping[str, str], problems: list[str]) -> Iterator[tuple[str, tuple[str, object]]]:
    variables = {setting.environment: key for key, setting in SETTINGS.items() if setting.environment}
    ours = tuple(f"CKPTSYNC_{section.upper()}_" for section in SECTIONS)
    for variable, value in environment.items():
        if variable in variables:
            yield variables[variable], (variable, value)
        elif variable.startswith(ours):  # others (CKPTSYNC_AUTOLOAD, …) are not the configuration's
            problems.append(f"{variable}: unknown variable{_suggestion(variable, variables)}")


def _value(key: str, where: str, value: object, problems: list[str]) -> Any:
    setting = SETTINGS[key]
    if value is None:  # not given, or a key with nothing behind it
        return setting.read(setting.default)
    try:
        return setting.read(value)
    except ValueError as e:
        problems.append(f"{where}: {e}")
        return setting.read(setting.default)


def _wants(values: Mapping[str, Any], name: str, known: set[str]) -> Iterator[str]:
    """What one key asks of another."""
    if not values["store.url"] and "store.url" not in known:
        yield f"{name}: store.url: missing: a path or URL is wanted, such as /mnt/checkpoints or s3://bucket/prefix"
    elif not values["store.url"]:
        yield f"{name}: store.url: empty: a path or URL is wanted"
    if "worker" in values["roles"] and not values["worker.runs"]:
        yield f"{name}: worker.runs: missing: the worker role wants at least one output directory"
    names = [run.name for run in values["worker.runs"] if run.name]
    yield from (f"{name}: worker.runs: two runs are named {run!r}" for run in sorted({n for n in names if names.count(n) > 1}))


def _config(values: Mapping[str, Any], overridden: tuple[str, ...]) -> Config:
    def section(name: str) -> dict[str, Any]:
        return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}

    return Config(
        node=values["node"],
        roles=values["roles"],
        store=StoreConfig(**section("store")),
        limits=LimitsConfig(**section("limits")),
        worker=WorkerConfig(**section("worker")),
        head=HeadConfig(**section("head")),
        verify=VerifyConfig(**section("verify")),
        retention=RetentionConfig(**section("retention")),
        alerts=AlertsConfig(**section("alerts")),
        metrics=MetricsConfig(**section("metrics")),
        log=LogConfig(**section("log")),
        overridden=overridden,
    )


def _at(name: str, document: Document, key: str) -> str:
    line = document.lines.get(key)
    return f"{name}:{line}: {key}" if line else f"{name}: {key}"


def _suggestion(key: str, among: Mapping[str, object] = SETTINGS) -> str:
    close = difflib.get_close_matches(key, [*among, *(SECTIONS if among is SETTINGS else ())], 1, 0.6)
    if not close:  # the right name in the wrong section
        close = [k for k in among if k.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return f" (did you mean {close[0]}?)" if close else ""


def _sections_hint(section: str) -> str:
    return f" (its keys are {', '.join(k.partition('.')[2] for k in SETTINGS if k.startswith(f'{section}.'))})"


def _all(name: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{name}: {len(problems)} problems\n" + "\n".join(f"  {problem}" for problem in problems)
