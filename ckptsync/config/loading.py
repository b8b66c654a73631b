"""File and environment → `Config`: every problem is found before one `ConfigError` names them all.

A default is overridden by the file, and the file by ``CKPTSYNC_*`` (`ckptsync.config.schema` says by which).
"""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptsync.config.schema import KEYS, SECTIONS, Config, LimitsConfig
from ckptsync.config.yaml_lines import LIMIT, Document, parse
from ckptsync.errors import ConfigError
from ckptsync.spool import folders
from ckptsync.stores.limits import Limits, RateLimiter, TokenBucket, Unlimited
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import UnsafeSpool, split

_HIDDEN = "***"
_VARIABLES = {key.variable: name for name, key in KEYS.items() if key.variable}
_Given = dict[str, tuple[str, object]]  # by key: where it is given (file and line, or variable), and its value as written


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration in a file, with the environment's overrides; raises ConfigError with every problem."""
    try:
        text = _content(path).decode()
    except UnsafeSpool:
        raise
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        hint = "give a configuration file with -c; `ckptsync config example worker` prints one, also head and both"
        raise ConfigError(f"{path}: cannot be read: {reason}", hint=hint) from e
    return read(text, str(path), environment)


def _content(path: Path) -> bytes:
    """Return a file's bytes; of a file that a hook wrote into a spool only if it is this user's alone.  Raises OSError."""
    if not split(path)[1]:
        with path.open("rb") as file:
            return file.read(LIMIT + 1)
    found = folders.read(path)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "no file of this user's", str(path))
    return found


def read(text: str, name: str, environment: Mapping[str, str]) -> Config:
    """Return the configuration in a file's text, as `load` does."""
    document = parse(text, name)
    problems = [f"{_at(name, document, key)}: given twice" for key in document.twice]
    in_file = {key: (where, value) for key, where, value in _known(document, name, problems)}
    overrides = _overrides(environment, problems)
    given = in_file | overrides
    values = {key: _value(key, given, problems) for key in KEYS}
    problems += _conflicts(values, name, given)
    if problems:
        raise ConfigError(_all(name, problems), hint="`ckptsync config example worker` prints every key, also head and both")
    sections = {section: of(**_section(section, values)) for section, of in SECTIONS.items()}
    return Config(values["node"], values["roles"], **sections, overridden=tuple(_overridden(in_file, overrides, values)))


def from_environment(environment: Mapping[str, str] = os.environ) -> tuple[dict[str, object], LimitsConfig]:
    """Return the store's options and the limits where there is no file; raises ConfigError with every problem."""
    problems: list[str] = []
    options = KEYS["store.options"].variable
    ours = {name: value for name, value in environment.items() if name == options or name.startswith("CKPTSYNC_LIMITS_")}
    given = _overrides(ours, problems)
    values = {key: _value(key, given, problems) for key in KEYS if key == "store.options" or key.startswith("limits.")}
    if problems:
        raise ConfigError(_all("environment", problems), hint="`ckptsync help cli` lists the variables and their values")
    return values["store.options"], LimitsConfig(**_section("limits", values))


def shown_url(url: str) -> str:
    """Return a store's URL for a message; one that is refused may have a password in it and is hidden."""
    try:
        located(url)
    except ConfigError:
        return _HIDDEN
    return url


def options_for(url: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options of a URL's own kind, where they are given for several (``{"s3": {…}, "sftp": {…}}``); a path gets all, and refuses any."""
    where = located(url)
    return Access(options).options_of(where) if isinstance(where, Remote) else options


def limits_of(config: LimitsConfig) -> Limits:
    """Return the limits of all stores of a process; its transfers share one pace, so call it once."""
    pace: RateLimiter = TokenBucket(config.bandwidth) if config.bandwidth else Unlimited()
    return Limits(pace, config.threads, config.memory, config.patience, config.stall)


def _known(document: Document, name: str, problems: list[str]) -> Iterator[tuple[str, str, object]]:
    """Yield name, place and value of every known key of a file; others become problems."""
    if document.values is not None and not isinstance(document.values, dict):
        problems.append(f"{name}: not a mapping of keys to values")
        return
    for top, value in (document.values or {}).items():
        if top in SECTIONS and value is None:
            continue  # a section whose keys are all commented out
        if top in SECTIONS and not isinstance(value, dict):
            keys = ", ".join(_section(top, KEYS))
            problems.append(f"{_at(name, document, top)}: {value!r} is not a mapping (its keys are {keys})")
            continue
        items = {f"{top}.{key}": v for key, v in value.items()} if top in SECTIONS else {str(top): value}
        for key, item in items.items():
            if key in KEYS:
                yield key, _at(name, document, key), item
            else:
                problems.append(f"{_at(name, document, key)}: unknown key{_suggestion(key, [*KEYS, *SECTIONS])}")


def _overrides(environment: Mapping[str, str], problems: list[str]) -> _Given:
    given: _Given = {}
    for variable, value in environment.items():
        if variable in _VARIABLES:
            given[_VARIABLES[variable]] = variable, value
        elif variable.startswith(
            tuple(f"CKPTSYNC_{section.upper()}_" for section in SECTIONS)
        ):  # others are not the configuration's
            problems.append(f"{variable}: unknown variable{_suggestion(variable, _VARIABLES)}")
    return given


def _value(key: str, given: _Given, problems: list[str]) -> Any:
    where, value = given.get(key, ("", None))
    try:
        if value is not None:  # None: not given, or a key with nothing behind it
            return KEYS[key].read(value)
    except ValueError as e:
        problems.append(f"{where}: {e}")
    return KEYS[key].read(KEYS[key].default)


def _conflicts(values: Mapping[str, Any], name: str, given: Collection[str]) -> Iterator[str]:
    """Yield what one key asks of another."""
    if not values["store.url"]:
        problem = "empty: a path or URL is expected" if "store.url" in given else "missing: a path or URL is expected"
        yield f"{name}: store.url: {problem}, such as /mnt/checkpoints or s3://bucket/prefix"
    if "worker" in values["roles"] and not values["worker.runs"]:
        yield f"{name}: worker.runs: missing: the worker role needs at least one output directory"
    names = [run.name for run in values["worker.runs"] if run.name]
    yield from (f"{name}: worker.runs: two runs are named {run!r}" for run in sorted({n for n in names if names.count(n) > 1}))


def _overridden(in_file: _Given, overrides: _Given, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each key of the file that a variable gives another value."""
    for key in (key for key in in_file if key in overrides):
        (where, old), (variable, new) = in_file[key], overrides[key]
        if _value(key, in_file, []) != values[key]:
            yield f"{where}: {_shown(key, old)} is overridden by {variable}={_shown(key, new)}"


def _shown(key: str, value: object) -> str:
    if KEYS[key].is_secret:
        return _HIDDEN
    return shown_url(str(value)) if key == "store.url" else f"{value!s:.200}"


def _section(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{section}.")}


def _at(name: str, document: Document, key: str) -> str:
    line = document.lines.get(key)
    return f"{name}:{line}: {key}" if line else f"{name}: {key}"


def _suggestion(key: str, among: Collection[str]) -> str:
    close = difflib.get_close_matches(key, among, 1, 0.6)
    if not close:  # the right name in the wrong section
        close = [name for name in among if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return f" (did you mean {close[0]}?)" if close else ""


def _all(name: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    return f"{name}: {len(problems)} problems\n" + "\n".join(f"  {problem}" for problem in problems)
