"""The grammar of commands: the store, what a command acts on, and what the parser refuses.

The store is ``--store URL``, else that of ``-c FILE``, else ``$CKPTSYNC_STORE``.  A positional
argument is ``RUN``, ``RUN/CHECKPOINT``, or a path or URL.  Stores are imported where one is opened:
``ckptsync --help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptsync.cli import output
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.near_names import did_you_mean

if TYPE_CHECKING:
    from ckptsync.config.schema import Config
    from ckptsync.stores.contract import Store
    from ckptsync.stores.opening import Access

T = TypeVar("T")
CHECKPOINT = "RUN/CHECKPOINT"
IN_STORE = "RUN[/CHECKPOINT]"
_LIST = "`ckptsync ls` lists the checkpoints"
# variables that say how stores are opened
_OF_STORES = ("CKPTSYNC_LIMITS_", "CKPTSYNC_STORAGE_OPTIONS")


class Parser(argparse.ArgumentParser):
    """The arguments of a command; what it refuses is a `ConfigError` with a hint.

    Options may stand between the words of an argument that takes several.  What follows `--` is
    another program's, where the parser has a default for ``training``.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments; words that are left over belong to the argument that takes several.

        Raises ConfigError for an unknown option.
        """
        words, training = [*(sys.argv[1:] if args is None else args)], None
        if self.get_default("training") is not None and "--" in words:
            at = words.index("--")
            words, training = words[:at], words[at + 1 :]
        parsed, rest = super().parse_known_args(words, namespace)
        if training is not None:
            parsed.training = training
        for word in rest:
            if word.startswith("-") and word != "-":
                options = [name for name in self._option_string_actions if name.startswith("--")]
                name = word.partition("=")[0]
                hint = did_you_mean(name, options) or self._see_help()
                raise ConfigError(f"{name}: no such option of `{self.prog}`", hint=hint)
        words_of = [a for a in self._actions if not a.option_strings]
        several = [n for n, action in enumerate(words_of) if action.nargs in ("*", "+")]
        if several and rest:
            # what follows the argument that takes several are the last words
            first, *last = words_of[several[0] :]
            found = [*getattr(parsed, first.dest), *(getattr(parsed, a.dest) for a in last), *rest]
            setattr(parsed, first.dest, found[: len(found) - len(last)])
            for action, word in zip(last, found[len(found) - len(last) :], strict=True):
                setattr(parsed, action.dest, word)
            rest = []
        if rest and "--store" in self._option_string_actions:
            hint = f"--store URL names the store; {self._see_help()}"
            raise ConfigError(f"{self.prog}: {rest[0]}: one argument too many", hint=hint)
        return parsed, rest

    def error(self, message: str) -> Any:
        """Raise ConfigError."""
        raise ConfigError(f"{self.prog}: {message}", hint=self._see_help())

    def _see_help(self) -> str:
        return f"`ckptsync help {self.prog.split()[1]}` shows its arguments and examples"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = [str(choice) for choice in action.choices or ()]
        if action.choices is not None and value not in action.choices:
            name = action.option_strings[0] if action.option_strings else action.metavar
            hint = did_you_mean(str(value), choices) or self._see_help()
            why = f"{name}: {value!r} is none of {', '.join(choices)}"
            raise ConfigError(f"{self.prog}: {why}", hint=hint)


def add_command(
    commands: Any, name: str, summary: str, details: str = ""
) -> argparse.ArgumentParser:
    """Add a command (or an action of one) with ``--json``.

    ``summary`` is a phrase without a full stop.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, **described(summary, details)
    )
    add_json(command)
    return command


def described(summary: str, details: str = "", epilog: str = "") -> dict[str, Any]:
    """Return what a parser of a command is made with."""
    text = f"{summary[0].upper()}{summary[1:]}. {details}"
    return {
        "description": "\n".join(textwrap.fill(line, 80) for line in text.splitlines()),
        "epilog": epilog,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_json(command: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    command.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the result as JSON on stdout, and errors as JSON on stderr",
    )


def add_dry_run(command: argparse.ArgumentParser, does: str) -> None:
    """Add ``--dry-run`` to a command that ``does`` something."""
    command.add_argument("--dry-run", action="store_true", help=f"only say what would be {does}")


def add_store_option(command: argparse.ArgumentParser) -> None:
    """Add ``--store`` and ``-c``."""
    command.add_argument(
        "--store",
        metavar="URL",
        dest="url",
        help="the store, a path or a URL (default: the store of -c, or $CKPTSYNC_STORE)",
    )
    command.add_argument(
        "-c",
        "--config",
        metavar="FILE",
        help="a configuration: its store, if --store names none, and its options, limits and rules",
    )


def add_targets(command: argparse.ArgumentParser, metavar: str, text: str) -> None:
    """Add what a command acts on, and how its store is named."""
    command.add_argument("targets", metavar=metavar, nargs="*", help=text)
    add_store_option(command)


def add_bandwidth(command: argparse.ArgumentParser) -> None:
    """Add ``--bandwidth``."""
    command.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="limit of all transfers together: for example 50MB/s, or a timetable as in rclone,"
        ' "08:00,50M 19:00,off" (default: $CKPTSYNC_LIMITS_BANDWIDTH, or off)',
    )


def option_value(option: str, read: Callable[[str], T], text: str) -> T:
    """Return what ``read`` makes of an option's text.  Raises ConfigError for its ValueError."""
    try:
        return read(text)
    except ValueError as e:
        raise ConfigError(f"{option}: {e}") from e


def configuration(args: argparse.Namespace) -> Config | None:
    """Return the configuration that ``-c`` names, if any; a command reads it once.

    Raises ConfigError.
    """
    if not getattr(args, "config", None):
        return None
    if "loaded" not in args:
        args.loaded = read_configuration(Path(args.config))
    found: Config = args.loaded
    return found


def read_configuration(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration in a file; warn on stderr of each key that a variable overrides.

    Raises ConfigError.
    """
    from ckptsync.config.loading import load

    config = load(path, environment)
    for line in config.overridden:
        output.say(f"ckptsync: warning: {line}", to_stderr=True)
    return config


def store_url(args: argparse.Namespace) -> str:
    """Return the URL of the store: of ``--store``, ``-c``, or CKPTSYNC_STORE, which is said.

    Raises ConfigError if none names one.
    """
    config = configuration(args)
    if url := args.url or (config.store.url if config else ""):
        return str(url)
    if url := os.environ.get("CKPTSYNC_STORE", ""):
        if not args.json and not getattr(args, "is_store_said", False):
            output.say(f"ckptsync: store {shown_store(url)} ($CKPTSYNC_STORE)", to_stderr=True)
        args.is_store_said = True
        return url
    hint = "name it with --store URL, or -c FILE, or set CKPTSYNC_STORE"
    raise ConfigError("no store is named", hint=hint)


def shown_store(url: str) -> str:
    """Return a store's URL for a message; one that is refused may hold a password."""
    from ckptsync.stores.urls import located

    try:
        located(url)
    except ConfigError:
        return "***"
    return url


def is_path(text: str) -> bool:
    """Return whether a word has the marks of a path or a URL, which no run's name has."""
    return "://" in text or text.startswith(("/", ".", "~"))


def may_be_store(args: argparse.Namespace, word: str) -> bool:
    """Return whether a word that names nothing in a store may be the store itself."""
    return is_path(word) or (not args.url and Path(word).is_dir())


def with_store(args: argparse.Namespace, url: str) -> str:
    """Return the command that was typed with ``url``, an argument of it, as ``--store``.

    Raises ConfigError for a URL that must not be repeated, as with a password.
    """
    from ckptsync.stores.urls import located

    located(url)
    words = [*args.words]
    if url in words:
        words.remove(url)
    return shlex.join(["ckptsync", *words, "--store", url])


def only_target(
    args: argparse.Namespace, metavar: str = IN_STORE, *, is_needed: bool = False
) -> str:
    """Return the word that names what a command acts on, or "".

    Raises ConfigError where there are several, or none where one ``is_needed``.
    """
    words: list[str] = args.targets
    if len(words) > 1:
        hints = [with_store(args, word) for word in words if may_be_store(args, word)]
        hint = hints[0] if hints else _LIST
        raise ConfigError(f"{' '.join(words)}: expected one {metavar}", hint=hint)
    if is_needed and not words:
        raise ConfigError(f"no {metavar} is named", hint=_LIST)
    return words[0] if words else ""


def store_and_name(args: argparse.Namespace, what: str) -> tuple[Store, str]:
    """Return the store of a command, and the ``RUN[/CHECKPOINT]`` in it that ``what`` names.

    ``what`` is such a name, or a URL or path of it in a store.  A path without a mark (`is_path`)
    is one only where no store is named.  Raises ConfigError, StoreError.
    """
    is_named = bool(args.url or getattr(args, "config", None))
    if not what or not (is_path(what) or not (is_named or "CKPTSYNC_STORE" in os.environ)):
        return named_store(args), what.strip("/")
    if is_named and args.url:
        why = f"{what}: is a path or a URL, and --store names another store"
        raise ConfigError(why, hint="give RUN[/CHECKPOINT], or leave --store out")
    from ckptsync.safe_names import CONSOLIDATED, RECORDS
    from ckptsync.stores.path_or_url import enclosing_store
    from ckptsync.stores.urls import located

    enclosing = enclosing_store(located(what), access_of(args))
    if enclosing is None and is_path(what):
        raise ConfigError(f"{what}: not inside a store", hint=with_store(args, what))
    if enclosing is None:
        hint = "name its store: --store URL, or -c FILE, or set CKPTSYNC_STORE"
        raise ConfigError(f"{what}: no store is named, and this lies in none", hint=hint)
    store, parts = enclosing
    if not parts:
        raise ConfigError(f"{what}: is a store; --store names it", hint=with_store(args, what))
    # the directories of consolidated models and of records stand for their checkpoint
    return store, "/".join(part for part in parts if part not in (CONSOLIDATED, RECORDS))


def store_run_location(args: argparse.Namespace, what: str) -> tuple[Store, str, str]:
    """Return the store of a command, and the run and location that ``what`` names, or "".

    Raises ConfigError, StoreError.
    """
    store, name = store_and_name(args, what)
    run, _, location = name.partition("/")
    if run:
        checked_name(run, "run")
    return store, run, checked_name(location, "checkpoint") if location else ""


def named_store(args: argparse.Namespace, opened: Callable[..., Store] | None = None) -> Store:
    """Return the store of `store_url`, opened by `open_store`, or by ``opened``.

    Raises ConfigError, StoreError.
    """
    from ckptsync.stores.opening import open_store
    from ckptsync.stores.urls import Remote, located

    url, access = store_url(args), access_of(args)
    where = located(url)
    if isinstance(where, Remote):
        options = access.options_of(where)
    else:  # options are for remote stores; a path refuses those of its own configuration
        options = access.options if configuration(args) and not args.url else {}
    return (opened or open_store)(url, options, access.limits)


def access_of(args: argparse.Namespace) -> Access:
    """Return how remote stores are opened, by ``-c``, ``--bandwidth`` or the environment.

    Raises ConfigError.
    """
    from ckptsync.stores.opening import Access

    config, bandwidth = configuration(args), getattr(args, "bandwidth", None)
    is_set = any(name.startswith(_OF_STORES) for name in os.environ)
    if not config and bandwidth is None and not is_set:
        return Access()
    from ckptsync.config import loading, value_parsers

    options, limits = (
        (config.store.options, config.limits) if config else loading.from_environment()
    )
    if config and getattr(args, "progress", None):
        limits = loading.share(config)  # other children of a head have the rest
    if bandwidth is not None:
        rate = option_value("--bandwidth", value_parsers.bandwidth, bandwidth)
        limits = replace(limits, bandwidth=rate)
    return Access(options, loading.limits_of(limits))


def checked_name(name: str, what: str) -> str:
    """Return ``name`` if ``what`` (a run, or a checkpoint) can have such a name.

    Raises ConfigError.
    """
    from ckptsync.safe_names import checked_path

    try:
        return checked_path(name)
    except Corrupt as e:
        why = f"{name!r}: not a name that a {what} can have"
        raise ConfigError(why, hint=_LIST) from e


def run_and_location(what: str) -> tuple[str, str]:
    """Return run and location of ``RUN/CHECKPOINT``.  Raises ConfigError."""
    run, _, location = what.strip("/").rpartition("/")
    if not run or not location:
        raise ConfigError(f"{what}: expected {CHECKPOINT}", hint=_LIST)
    return checked_name(run, "run"), checked_name(location, "checkpoint")
