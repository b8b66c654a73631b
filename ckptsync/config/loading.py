"""Read a configuration from a file and the environment.

A default is overridden by the file, and the file by ``CKPTSYNC_*`` variables
(`ckptsync.config.schema` names them). One `ConfigError` names all problems.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ckptsync.config.schema import KEYS, SECTIONS, Config, LimitsConfig, variable_of
from ckptsync.config.value_parsers import APPRISE_FORM, is_local
from ckptsync.config.yaml_lines import LIMIT, Document, parse
from ckptsync.errors import ConfigError
from ckptsync.near_names import near_names
from ckptsync.safe_open import read_named
from ckptsync.spool import safe_files
from ckptsync.stores.limits import Limits, RateLimiter, TokenBucket, Unlimited
from ckptsync.stores.opening import Access
from ckptsync.stores.urls import Remote, located
from ckptsync.walk import UnsafeSpool, split

_HIDDEN = "***"
_LEAST_MEMORY = 16 << 20  # bytes: two parts of an upload
_MOST = 50  # problems that are shown
_VARIABLES = {key.variable: name for name, key in KEYS.items() if key.variable}
_REMOVED = {"alerts.webhook": f"is now a URL in alerts.urls: {APPRISE_FORM}"}
_REMOVED_VARIABLES = {variable_of(key): text for key, text in _REMOVED.items()}
_Given = dict[str, tuple[str, object]]
"""By key: where it is given (file and line, or variable), and its value as written."""


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration in a file, with the environment's overrides.

    A file that a hook wrote into a spool is read only if it is this user's alone.  Raises
    ConfigError with every problem.
    """
    config = read(_text_of(path), str(path), environment)
    return replace(config, file=os.path.abspath(path))  # noqa: PTH100 - links stay


def _text_of(path: Path) -> str:
    """Return a file's text.  Raises ConfigError."""
    try:
        if split(path)[1]:
            content = safe_files.read(path)
            if content is None:
                raise FileNotFoundError(errno.ENOENT, "no file of this user's", str(path))
        else:
            content = read_named(path, LIMIT)
        return content.decode()
    except UnsafeSpool:
        raise
    except (OSError, UnicodeDecodeError) as e:
        reason = e.strerror if isinstance(e, OSError) else "not UTF-8"
        hint = "`ckptsync init FILE` writes one; -c names it"
        raise ConfigError(f"{path}: cannot be read: {reason}", hint=hint) from e


def read(text: str, name: str, environment: Mapping[str, str]) -> Config:
    """Return the configuration in a file's text, as `load` does."""
    document = parse(text, name)
    problems = [f"{_at(name, document, key)}: given twice" for key in document.twice]
    in_file = _known(document, name, problems)
    overrides = _overrides(environment, problems)
    given = in_file | overrides
    refused: dict[str, str] = {}
    values = {key: _value(key, given, refused) for key in KEYS}
    problems += refused.values()
    # of a value that could not be read nothing else is a problem
    problems += [text for key, text in _conflicts(values, name, given) if key not in refused]
    if problems:
        hint = "`ckptsync help configuration` lists every key"
        raise ConfigError(_all(name, problems), hint=hint)
    overridden = []
    for key in (key for key in in_file if key in overrides):
        (where, old), (variable, new) = in_file[key], overrides[key]
        if _value(key, in_file, {}) != values[key]:
            by = f"{variable}={_shown(key, new)}"
            overridden.append(f"{where}: {_shown(key, old)} is overridden by {by}")
    sections = {section: of(**_section(section, values)) for section, of in SECTIONS.items()}
    top = {key: values[key] for key in ("node", "roles", "events")}
    return Config(**top, **sections, overridden=tuple(overridden))


class Setting(NamedTuple):
    """A key, its value as it is written (a secret hidden), and the file's line or the variable.

    ``source`` is ``default`` where neither gives it.
    """

    key: str
    value: object
    source: str


def settings(path: Path, environment: Mapping[str, str] = os.environ) -> list[Setting]:
    """Return every key of a configuration, in the order of the schema.

    Raises ConfigError, as `load` does.
    """
    load(path, environment)
    name, unread = str(path), list[str]()
    in_file = _known(parse(_text_of(path), name), name, unread)
    given = in_file | _overrides(environment, unread)
    listed = []
    for key in KEYS:
        source, value = given.get(key, ("default", None))
        if value is None:
            source, value = "default", KEYS[key].default
        source = source.removesuffix(f": {key}")
        hidden = KEYS[key].is_secret and value != KEYS[key].default
        listed.append(
            Setting(key, _shown(key, value) if hidden or key == "store.url" else value, source)
        )
    return listed


def from_environment(
    environment: Mapping[str, str] = os.environ,
) -> tuple[dict[str, object], LimitsConfig]:
    """Return the store's options and the limits where there is no file.

    Raises ConfigError with every problem.
    """
    problems: list[str] = []
    prefixes = ("CKPTSYNC_STORAGE_OPTIONS", "CKPTSYNC_LIMITS_")
    ours = {name: value for name, value in environment.items() if name.startswith(prefixes)}
    given = _overrides(ours, problems)
    keys = ["store.options", *(key for key in KEYS if key.startswith("limits."))]
    refused: dict[str, str] = {}
    values = {key: _value(key, given, refused) for key in keys}
    if problems := [*problems, *refused.values()]:
        hint = "`ckptsync help cli` lists the variables and their values"
        raise ConfigError(_all("environment", problems), hint=hint)
    return values["store.options"], LimitsConfig(**_section("limits", values))


def shown_url(url: str) -> str:
    """Return a store's URL for a message.

    One that is refused may have a password in it and is hidden.
    """
    try:
        located(url)
    except ConfigError:
        return _HIDDEN
    return url


def options_for(url: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """Return the options for a URL's scheme, where they are given by scheme (``{"s3": {…}}``).

    A path gets all, and refuses any.
    """
    where = located(url)
    return Access(options).options_of(where) if isinstance(where, Remote) else options


def limits_of(config: LimitsConfig) -> Limits:
    """Return the limits of all stores of a process.

    Its transfers share one rate limiter, so call it once.
    """
    pace: RateLimiter = TokenBucket(config.bandwidth) if config.bandwidth else Unlimited()
    return Limits(pace, config.threads, config.memory, config.patience, config.stall)


def share(config: Config) -> LimitsConfig:
    """Return the part of the limits that one child of a head has, which shares them with others."""
    limits, count = config.limits, config.head.jobs
    table = limits.bandwidth
    rates = tuple(rate and rate / count for rate in table.rates) if table else ()
    memory = max(min(limits.memory, _LEAST_MEMORY), limits.memory // (count + 4))
    return replace(limits, bandwidth=replace(table, rates=rates) if table else None, memory=memory)


def _known(document: Document, name: str, problems: list[str]) -> _Given:
    """Return every known key of a file; others become problems."""
    if document.values is not None and not isinstance(document.values, dict):
        problems.append(f"{name}: not a mapping of keys to values")
        return {}
    found: _Given = {}
    for top, value in (document.values or {}).items():
        if top in SECTIONS and value is None:
            continue  # a section whose keys are all commented out
        if top in SECTIONS and not isinstance(value, dict):
            what = f"{value!r} is not a mapping (its keys are {', '.join(_section(top, KEYS))})"
            problems.append(f"{_at(name, document, top)}: {what}")
            continue
        items = {top: value}
        if top in SECTIONS:
            items = {f"{top}.{key}": item for key, item in value.items()}
        for key, item in items.items():
            where = _at(name, document, key)
            if key in KEYS:
                found[key] = where, item
            elif key in _REMOVED:
                problems.append(f"{where} {_REMOVED[key]}")
            else:
                # a comparison with every key takes a while: nobody reads thousands
                meant = _suggestion(key, [*KEYS, *SECTIONS]) if len(problems) < _MOST else ""
                problems.append(f"{where}: unknown key{meant}")
    return found


def _overrides(environment: Mapping[str, str], problems: list[str]) -> _Given:
    """Return the keys that variables give; an unknown variable of a section becomes a problem."""
    sections = tuple(f"CKPTSYNC_{section.upper()}_" for section in SECTIONS)
    given: _Given = {}
    for variable, value in environment.items():
        if variable in _VARIABLES:
            given[_VARIABLES[variable]] = variable, value
        elif variable in _REMOVED_VARIABLES:
            problems.append(f"{variable} {_REMOVED_VARIABLES[variable]}")
        elif variable.startswith(sections):
            problems.append(f"{variable}: unknown variable{_suggestion(variable, _VARIABLES)}")
    return given


def _value(key: str, given: _Given, refused: dict[str, str]) -> Any:
    """Return a key's value; its default, and the problem in ``refused``, if it cannot be read."""
    where, value = given.get(key, ("", None))
    try:
        if value is not None:  # None: not given, or a key with nothing behind it
            return KEYS[key].read(value)
    except ValueError as e:
        refused[key] = f"{where}: {e}"
    return KEYS[key].read(KEYS[key].default)


def _conflicts(
    values: Mapping[str, Any], name: str, given: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield problems between keys, each with the key that it is of."""
    if not values["store.url"]:
        problem = "empty" if "store.url" in given else "missing"
        example = "such as /mnt/checkpoints or s3://bucket/prefix"
        text = f"{name}: store.url: {problem}: a path or URL is expected, {example}"
        yield "store.url", text
    if "worker" in values["roles"] and not values["worker.runs"]:
        why = "missing: the worker role needs at least one output directory"
        yield "worker.runs", f"{name}: worker.runs: {why}"
    if problem := token_problem(values["web.listen"], values["web.token"]):
        yield "web.listen", f"{name}: web.listen: {problem}"
    if values["web.listen"] and not {"head", "verifier"} & set(values["roles"]):
        why = "a worker does not know the whole store: set it where the head runs"
        yield "web.listen", f"{name}: web.listen: {why}, or use `ckptsync web`"
    if values["events"] and "head" not in values["roles"]:
        yield "events", f"{name}: events: only a head has events: set them where the head runs"
    if "://" in values["store.url"].removeprefix("file://"):
        for event in (event for event in values["events"] if event.uses_path):
            why = "{path} is of a store that is a path; use {url}, or `ckptsync pull`"
            yield "events", f"{name}: events: {event.name}: {why}"
    names = [run.name for run in values["worker.runs"] if run.name]
    for run in sorted(run for run, count in Counter(names).items() if count > 1):
        yield "worker.runs", f"{name}: worker.runs: two runs are named {run!r}"


def token_problem(listen: str, token: str) -> str:
    """Return why the page may not be shown at an address without a token; empty if it may."""
    if token or not listen or is_local(listen):
        return ""
    why = "other machines reach this address, and web.token is not set"
    return f"{listen}: {why}; set it, or listen on 127.0.0.1 or unix:/path"


def _shown(key: str, value: object) -> str:
    if KEYS[key].is_secret:
        return _HIDDEN
    return shown_url(str(value)) if key == "store.url" else f"{value!s:.200}"


def _section(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    prefix = f"{section}."
    there = {key: value for key, value in values.items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): value for key, value in there.items()}


def _at(name: str, document: Document, key: str) -> str:
    line = document.lines.get(key)
    return f"{name}:{line}: {key}" if line else f"{name}: {key}"


def _suggestion(key: str, among: Collection[str]) -> str:
    close = near_names(key, among)
    if not close:  # the right name in the wrong section
        close = [name for name in among if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return f" (did you mean {close[0]}?)" if close else ""


def _all(name: str, problems: list[str]) -> str:
    if len(problems) == 1:
        return problems[0]
    more = [f"and {len(problems) - _MOST} more"] if len(problems) > _MOST else []
    return f"{name}: {len(problems)} problems: {'; '.join([*problems[:_MOST], *more])}"
