"""Read a configuration from a file and the environment.

The file overrides defaults, and ``CKPTSYNC_*`` variables (`ckptsync.config.schema` names them)
override the file.  All values are read before anything is reported, so that one `ConfigError` names
every problem.
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
from ckptsync.stores.urls import Remote, located, shown_url
from ckptsync.walk import UnsafeSpool, split

_HIDDEN = "***"
_LEAST_MEMORY = 16 << 20  # bytes: two parts of an upload
_MOST_SHOWN = 50  # problems of one error
_VARIABLES = {key.variable: name for name, key in KEYS.items() if key.variable}
_REMOVED = {"alerts.webhook": f"is now a URL in alerts.urls: {APPRISE_FORM}"}
_REMOVED_VARIABLES = {variable_of(key): text for key, text in _REMOVED.items()}
_WrittenValues = dict[str, tuple[str, object]]
"""For each key that is set: its source (file and line, or variable), and the value as written."""


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Read a file; return its configuration, with the environment's overrides and the file's path.

    Raises ConfigError with every problem, and UnsafeSpool for a file in a spool (a hook wrote it)
    that other users could have changed.
    """
    config = read(_text_of(path), str(path), environment)
    return replace(config, file=os.path.abspath(path))  # noqa: PTH100 - links stay


def _text_of(path: Path) -> str:
    """Return a file's text.  Raises ConfigError, also for no UTF-8, and UnsafeSpool as `load`.

    A file in a spool must be this user's.  Of any other at most `LIMIT` + 1 bytes are read, so that
    `parse` refuses a longer one.
    """
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
    """Return the configuration in a file's text; ``name`` is the file's name in messages.

    Variables in ``environment`` override keys; ``overridden`` names those that had another value.
    Raises ConfigError with every problem, also for a key that is given twice or contradicts
    another.
    """
    document = parse(text, name)
    problems = [f"{_position(name, document, key)}: given twice" for key in document.twice]
    in_file = _file_values(document, name, problems)
    overrides = _overrides(environment, problems)
    written = in_file | overrides
    refused: dict[str, str] = {}
    values = {key: _value(key, written, refused) for key in KEYS}
    problems += refused.values()
    # a value that could not be read has its problem already
    problems += [text for key, text in _conflicts(values, name, written) if key not in refused]
    if problems:
        hint = "`ckptsync help configuration` lists every key"
        raise ConfigError(_join_problems(name, problems), hint=hint)
    overridden = []
    for key in (key for key in in_file if key in overrides):
        (position, old), (variable, new) = in_file[key], overrides[key]
        if _value(key, in_file, {}) != values[key]:
            setting = f"{variable}={_shown_value(key, new)}"
            overridden.append(f"{position}: {_shown_value(key, old)} is overridden by {setting}")
    sections = {
        section: section_type(**_section(section, values))
        for section, section_type in SECTIONS.items()
    }
    top = {key: values[key] for key in ("node", "roles", "events")}
    return Config(**top, **sections, overridden=tuple(overridden))


class Setting(NamedTuple):
    """A key, its value as it is written (a secret is hidden), and its source.

    ``source``: the file's line, the variable, or ``default``.
    """

    key: str
    value: object
    source: str


def settings(path: Path, environment: Mapping[str, str] = os.environ) -> list[Setting]:
    """Return every key of a configuration file, in the order of the schema.

    A key that is not set, or is empty, has its default.  Raises ConfigError and UnsafeSpool, as
    `load` does.
    """
    load(path, environment)
    name, problems = str(path), list[str]()
    in_file = _file_values(parse(_text_of(path), name), name, problems)
    written = in_file | _overrides(environment, problems)
    result = []
    for key in KEYS:
        source, value = written.get(key, ("default", None))
        if value is None:
            source, value = "default", KEYS[key].default
        source = source.removesuffix(f": {key}")
        hidden = KEYS[key].is_secret and value != KEYS[key].default
        result.append(
            Setting(
                key, _shown_value(key, value) if hidden or key == "store.url" else value, source
            )
        )
    return result


def from_environment(
    environment: Mapping[str, str] = os.environ,
) -> tuple[dict[str, object], LimitsConfig]:
    """Return the store's options and the limits that variables set, for use without a file.

    Keys that no variable sets have their defaults.  Raises ConfigError with every problem.
    """
    problems: list[str] = []
    prefixes = ("CKPTSYNC_STORAGE_OPTIONS", "CKPTSYNC_LIMITS_")
    store_variables = {
        name: value for name, value in environment.items() if name.startswith(prefixes)
    }
    written = _overrides(store_variables, problems)
    keys = ["store.options", *(key for key in KEYS if key.startswith("limits."))]
    refused: dict[str, str] = {}
    values = {key: _value(key, written, refused) for key in keys}
    if problems := [*problems, *refused.values()]:
        hint = "`ckptsync help configuration` lists the variables and their values"
        raise ConfigError(_join_problems("environment", problems), hint=hint)
    return values["store.options"], LimitsConfig(**_section("limits", values))


def options_for(url: str, options: Mapping[str, object]) -> Mapping[str, object]:
    """Return the client options for a store's URL.

    Options may be grouped by scheme (``{"s3": {…}}``); those of the URL's scheme are returned.  For
    a path all are returned, and opening it refuses any.  Raises ConfigError if ``url`` is no path
    or URL.
    """
    path_or_url = located(url)
    return Access(options).options_of(path_or_url) if isinstance(path_or_url, Remote) else options


def limits_of(config: LimitsConfig) -> Limits:
    """Return the limits of all stores of a process, with a new rate limiter.

    Call it once in a process: its transfers must share one rate limiter.
    """
    pace: RateLimiter = TokenBucket(config.bandwidth) if config.bandwidth else Unlimited()
    return Limits(pace, config.threads, config.memory, config.patience, config.stall)


def share(config: Config) -> LimitsConfig:
    """Return the limits of one child of a head, whose children work at the same time.

    Bandwidth is divided by ``head.jobs``; memory by four more, but not below `_LEAST_MEMORY`,
    unless the limit itself is lower.  Other limits are the head's.
    """
    limits, count = config.limits, config.head.jobs
    table = limits.bandwidth
    rates = tuple(rate and rate / count for rate in table.rates) if table else ()
    memory = max(min(limits.memory, _LEAST_MEMORY), limits.memory // (count + 4))
    return replace(limits, bandwidth=replace(table, rates=rates) if table else None, memory=memory)


def _file_values(document: Document, name: str, problems: list[str]) -> _WrittenValues:
    """Return for each known key in the file its position and value, which is not read or checked.

    Append to ``problems`` for unknown and removed keys, wrong sections, and a document that is no
    mapping, which returns {}.
    """
    if document.values is not None and not isinstance(document.values, dict):
        problems.append(f"{name}: not a mapping of keys to values")
        return {}
    written: _WrittenValues = {}
    for top, value in (document.values or {}).items():
        if top in SECTIONS and value is None:
            continue  # a section whose keys are all commented out
        if top in SECTIONS and not isinstance(value, dict):
            why = f"{value!r} is not a mapping (its keys are {', '.join(_section(top, KEYS))})"
            problems.append(f"{_position(name, document, top)}: {why}")
            continue
        items = {top: value}
        if top in SECTIONS:
            items = {f"{top}.{key}": item for key, item in value.items()}
        for key, item in items.items():
            position = _position(name, document, key)
            if key in KEYS:
                written[key] = position, item
            elif key in _REMOVED:
                problems.append(f"{position} {_REMOVED[key]}")
            else:
                # comparing with every key takes long: only for problems that are shown
                suggestion = (
                    _suggestion(key, [*KEYS, *SECTIONS]) if len(problems) < _MOST_SHOWN else ""
                )
                problems.append(f"{position}: unknown key{suggestion}")
    return written


def _overrides(environment: Mapping[str, str], problems: list[str]) -> _WrittenValues:
    """Return for each key that a variable sets the variable and its text, not yet checked.

    Append to ``problems`` for a removed variable, and an unknown one that begins as a section's.
    """
    sections = tuple(f"CKPTSYNC_{section.upper()}_" for section in SECTIONS)
    written: _WrittenValues = {}
    for variable, value in environment.items():
        if variable in _VARIABLES:
            written[_VARIABLES[variable]] = variable, value
        elif variable in _REMOVED_VARIABLES:
            problems.append(f"{variable} {_REMOVED_VARIABLES[variable]}")
        elif variable.startswith(sections):
            problems.append(f"{variable}: unknown variable{_suggestion(variable, _VARIABLES)}")
    return written


def _value(key: str, written: _WrittenValues, refused: dict[str, str]) -> Any:
    """Return a key's value as its reader reads it; its default if it is not set, empty or wrong.

    Add the problem of a wrong value to ``refused``.
    """
    where, value = written.get(key, ("", None))
    try:
        if value is not None:  # None: the key is not set, or has an empty value
            return KEYS[key].read(value)
    except ValueError as e:
        refused[key] = f"{where}: {e}"
    return KEYS[key].read(KEYS[key].default)


def _conflicts(
    values: Mapping[str, Any], name: str, written_keys: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Yield each problem between keys, after the key that must change."""
    if not values["store.url"]:
        problem = "empty" if "store.url" in written_keys else "missing"
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
    """Return why an address needs a token that is not set; empty if it needs none or has one."""
    if token or not listen or is_local(listen):
        return ""
    why = "other machines reach this address, and web.token is not set"
    return f"{listen}: {why}; set it, or listen on 127.0.0.1 or unix:/path"


def _shown_value(key: str, value: object) -> str:
    """Return a value for a message: a secret hidden, others cut at 200 characters."""
    if KEYS[key].is_secret:
        return _HIDDEN
    return shown_url(str(value)) if key == "store.url" else f"{value!s:.200}"


def _section(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a section's keys, without the section in their names."""
    prefix = f"{section}."
    own_values = {key: value for key, value in values.items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): value for key, value in own_values.items()}


def _position(name: str, document: Document, key: str) -> str:
    """Return file, line (if known) and key, as the beginning of a problem."""
    line = document.lines.get(key)
    return f"{name}:{line}: {key}" if line else f"{name}: {key}"


def _suggestion(key: str, among: Collection[str]) -> str:
    """Return " (did you mean …?)" for a key like one of ``among``; "" if there is none.

    Without a similar one, suggest a key that has the same name in another section.
    """
    close = near_names(key, among)
    if not close:  # the right name in the wrong section
        close = [name for name in among if name.rpartition(".")[2] == key.rpartition(".")[2]][:1]
    return f" (did you mean {close[0]}?)" if close else ""


def _join_problems(name: str, problems: list[str]) -> str:
    """Return the only problem, or a text with the count and the first `_MOST_SHOWN` of several."""
    if len(problems) == 1:
        return problems[0]
    remainder = [f"and {len(problems) - _MOST_SHOWN} more"] if len(problems) > _MOST_SHOWN else []
    return f"{name}: {len(problems)} problems: {'; '.join([*problems[:_MOST_SHOWN], *remainder])}"
