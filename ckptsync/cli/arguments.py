"""The arguments that commands share: how the store is named, and what in it a command acts on.

A user must not learn each command anew, so all of them define and read these arguments by the
functions of this module.  The store is ``--store URL``, else that of ``-c FILE``, else
``$CKPTSYNC_STORE``.  A target is ``RUN``, ``RUN/CHECKPOINT``, or a path or URL of one in a store.
Packages that open stores are imported only when a store is opened, so that ``ckptsync --help``
answers at once.
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
# prefixes of variables that say how stores are opened
_OF_STORES = ("CKPTSYNC_LIMITS_", "CKPTSYNC_STORAGE_OPTIONS")


class Parser(argparse.ArgumentParser):
    """The parser of a command, which raises ConfigError with a hint instead of ending the process.

    Options may stand between the words of an argument that takes several.  If the parser has a
    default for ``training``, the words after `--` are the command of a training.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the parsed arguments, and words that no argument takes.

        Words after an option are added to the argument that takes several.  Raises ConfigError for
        an unknown option, and for a word too many of a command with a store.
        """
        words, training = [*(sys.argv[1:] if args is None else args)], None
        if self.get_default("training") is not None and "--" in words:
            index = words.index("--")
            words, training = words[:index], words[index + 1 :]
        parsed, unread = super().parse_known_args(words, namespace)
        if training is not None:
            parsed.training = training
        for word in unread:
            if word.startswith("-") and word != "-":
                options = [name for name in self._option_string_actions if name.startswith("--")]
                name = word.partition("=")[0]
                hint = did_you_mean(name, options) or self._see_help()
                raise ConfigError(f"{name}: no such option of `{self.prog}`", hint=hint)
        positionals = [a for a in self._actions if not a.option_strings]
        several = [n for n, action in enumerate(positionals) if action.nargs in ("*", "+")]
        if several and unread:
            # arguments after the one that takes several get the last words
            first, *later = positionals[several[0] :]
            values = [
                *getattr(parsed, first.dest),
                *(getattr(parsed, a.dest) for a in later),
                *unread,
            ]
            setattr(parsed, first.dest, values[: len(values) - len(later)])
            for action, word in zip(later, values[len(values) - len(later) :], strict=True):
                setattr(parsed, action.dest, word)
            unread = []
        if unread and "--store" in self._option_string_actions:
            hint = f"--store URL names the store; {self._see_help()}"
            raise ConfigError(f"{self.prog}: {unread[0]}: one argument too many", hint=hint)
        return parsed, unread

    def error(self, message: str) -> Any:
        """Raise ConfigError with argparse's message."""
        raise ConfigError(f"{self.prog}: {message}", hint=self._see_help())

    def _see_help(self) -> str:
        """Return the hint that names the help page of this parser's command."""
        return f"`ckptsync help {self.prog.split()[1]}` shows its arguments and examples"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise ConfigError for a value that is none of the argument's choices."""
        choices = [str(choice) for choice in action.choices or ()]
        if action.choices is not None and value not in action.choices:
            name = action.option_strings[0] if action.option_strings else action.metavar
            hint = did_you_mean(str(value), choices) or self._see_help()
            why = f"{name}: {value!r} is none of {', '.join(choices)}"
            raise ConfigError(f"{self.prog}: {why}", hint=hint)


def add_command(
    commands: Any, name: str, summary: str, details: str = ""
) -> argparse.ArgumentParser:
    """Add the parser of a command, or of an action of one, with ``--json``, and return it.

    ``summary`` is a phrase without a full stop; ``details`` are sentences that follow it.
    """
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=summary, **parser_options(summary, details)
    )
    add_json(command)
    return command


def parser_options(summary: str, details: str = "", epilog: str = "") -> dict[str, Any]:
    """Return the keyword arguments that every command's parser is made with."""
    text = f"{summary[0].upper()}{summary[1:]}. {details}"
    return {
        "description": "\n".join(textwrap.fill(line, 80) for line in text.splitlines()),
        "epilog": epilog,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }


def add_json(command: argparse.ArgumentParser) -> None:
    """Define ``--json``."""
    command.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the result as JSON on stdout, and errors as JSON on stderr",
    )


def add_dry_run(command: argparse.ArgumentParser, does: str) -> None:
    """Define ``--dry-run``; ``does`` is a participle, such as "written"."""
    command.add_argument("--dry-run", action="store_true", help=f"only say what would be {does}")


def add_store_option(command: argparse.ArgumentParser) -> None:
    """Define ``--store`` and ``-c``."""
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
    """Define the targets, any number of them, with ``--store`` and ``-c``."""
    command.add_argument("targets", metavar=metavar, nargs="*", help=text)
    add_store_option(command)


def add_bandwidth(command: argparse.ArgumentParser) -> None:
    """Define ``--bandwidth``."""
    command.add_argument(
        "--bandwidth",
        metavar="RATE",
        help="limit of all transfers together: for example 50MB/s, or a timetable as in rclone,"
        ' "08:00,50M 19:00,off" (default: $CKPTSYNC_LIMITS_BANDWIDTH, or off)',
    )


def add_jobs(command: argparse.ArgumentParser, does: str) -> None:
    """Define ``--jobs``; ``does`` says what the threads do, such as "read and digest"."""
    command.add_argument(
        "--jobs",
        metavar="N",
        type=int,
        help=f"threads that {does}; 1: only the main thread (default: one for each core, at most 8;"
        " 4 from a URL)",
    )


def add_ignore_times(command: argparse.ArgumentParser) -> None:
    """Define ``--ignore-times``."""
    command.add_argument(
        "--ignore-times",
        action="store_true",
        help="do not compare the files' times to find shards of different saves: the times were"
        " lost in copying",
    )


def option_value(option: str, parse: Callable[[str], T], text: str) -> T:
    """Return what ``parse`` returns for an option's text; raise its ValueError as ConfigError."""
    try:
        return parse(text)
    except ValueError as e:
        raise ConfigError(f"{option}: {e}") from e


def configuration(args: argparse.Namespace) -> Config | None:
    """Return the configuration that ``-c`` names; None without ``-c``.

    The first call reads the file, prints warnings as `read_configuration`, and keeps the result in
    ``args.loaded``.  Raises ConfigError.
    """
    if not getattr(args, "config", None):
        return None
    if "loaded" not in args:
        args.loaded = read_configuration(Path(args.config))
    config: Config = args.loaded
    return config


def read_configuration(path: Path, environment: Mapping[str, str] = os.environ) -> Config:
    """Return the configuration in a file; print a warning for each key that a variable overrides.

    Raises ConfigError.
    """
    from ckptsync.config.loading import load

    config = load(path, environment)
    for line in config.overridden:
        output.say(f"ckptsync: warning: {line}", to_stderr=True)
    return config


def store_url(args: argparse.Namespace) -> str:
    """Return the URL of the store that ``--store``, else ``-c``, else CKPTSYNC_STORE names.

    For CKPTSYNC_STORE, print it on stderr once, but not with ``--json``; set
    ``args.is_store_said``.  Raises ConfigError if none names a store.
    """
    config = configuration(args)
    if url := args.url or (config.store.url if config else ""):
        return str(url)
    if url := os.environ.get("CKPTSYNC_STORE", ""):
        if not args.json and not getattr(args, "is_store_said", False):
            from ckptsync.stores.urls import shown_url

            output.say(f"ckptsync: store {shown_url(url)} ($CKPTSYNC_STORE)", to_stderr=True)
        args.is_store_said = True
        return url
    hint = "name it with --store URL, or -c FILE, or set CKPTSYNC_STORE"
    raise ConfigError("no store is named", hint=hint)


def is_path(text: str) -> bool:
    """Return whether a word looks like a path or a URL, as no run's name does."""
    return "://" in text or text.startswith(("/", ".", "~"))


def may_be_store(args: argparse.Namespace, word: str) -> bool:
    """Return whether a word that names nothing in a store may be the store: a path or directory."""
    return is_path(word) or (not args.url and Path(word).is_dir())


def with_store(args: argparse.Namespace, url: str) -> str:
    """Return the typed command with its argument ``url`` given as ``--store``, for a hint.

    Raises ConfigError for a URL that must not be printed, since it has a password.
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
    """Return the one target of a command, or "" if none is given.

    Raises ConfigError for several, and for none if ``is_needed``.
    """
    words: list[str] = args.targets
    if len(words) > 1:
        hints = [with_store(args, word) for word in words if may_be_store(args, word)]
        hint = hints[0] if hints else _LIST
        raise ConfigError(f"{' '.join(words)}: expected one {metavar}", hint=hint)
    if is_needed and not words:
        raise ConfigError(f"no {metavar} is named", hint=_LIST)
    return words[0] if words else ""


def store_and_name(args: argparse.Namespace, target: str) -> tuple[Store, str]:
    """Return the store of a command, and the ``RUN[/CHECKPOINT]`` in it that ``target`` names.

    ``target`` is such a name, or its path or URL in a store, which then is the store.  A path that
    does not look like one (`is_path`) counts as one only if no store is named.

    Raises ConfigError, also for a path that is in no store or is a store itself; StoreError.
    """
    is_named = bool(args.url or getattr(args, "config", None))
    if not target or not (is_path(target) or not (is_named or "CKPTSYNC_STORE" in os.environ)):
        return named_store(args), target.strip("/")
    if is_named and args.url:
        why = f"{target}: is a path or a URL, and --store names another store"
        raise ConfigError(why, hint="give RUN[/CHECKPOINT], or leave --store out")
    from ckptsync.safe_names import CONSOLIDATED, RECORDS
    from ckptsync.stores.path_or_url import enclosing_store
    from ckptsync.stores.urls import located

    enclosing = enclosing_store(located(target), access_of(args))
    if enclosing is None and is_path(target):
        raise ConfigError(f"{target}: not inside a store", hint=with_store(args, target))
    if enclosing is None:
        hint = "name its store: --store URL, or -c FILE, or set CKPTSYNC_STORE"
        raise ConfigError(f"{target}: no store is named, and this lies in none", hint=hint)
    store, components = enclosing
    if not components:
        raise ConfigError(f"{target}: is a store; --store names it", hint=with_store(args, target))
    # the directories of consolidated models and of records stand for their checkpoint
    return store, "/".join(part for part in components if part not in (CONSOLIDATED, RECORDS))


def store_run_location(args: argparse.Namespace, target: str) -> tuple[Store, str, str]:
    """Return the store of a command, and the run and the location that ``target`` names.

    Either is "" if it is not named.  Raises ConfigError, StoreError, as `store_and_name`.
    """
    store, name = store_and_name(args, target)
    run, _, location = name.partition("/")
    if run:
        checked_name(run, "run")
    return store, run, checked_name(location, "checkpoint") if location else ""


def named_store(
    args: argparse.Namespace, open_function: Callable[..., Store] | None = None
) -> Store:
    """Return the store of `store_url`, opened by ``open_function``, or by `open_store`.

    Client options are passed to a remote store, and to the path of a configuration, which refuses
    any.  Raises ConfigError, also if the store's path is not UTF-8, and StoreError.
    """
    from ckptsync.stores.opening import open_store
    from ckptsync.stores.urls import Remote, located

    url, access = store_url(args), access_of(args)
    path_or_url = located(url)
    try:
        (path_or_url.url if isinstance(path_or_url, Remote) else str(path_or_url)).encode()
    except UnicodeEncodeError as e:
        hint = "rename its directories: configurations and records are UTF-8, and name the store"
        raise ConfigError(f"{url}: the path of a store must be UTF-8", hint=hint) from e
    if isinstance(path_or_url, Remote):
        options = access.options_of(path_or_url)
    else:  # options are for remote stores; a path refuses those of its own configuration
        options = access.options if configuration(args) and not args.url else {}
    return (open_function or open_store)(url, options, access.limits)


def access_of(args: argparse.Namespace) -> Access:
    """Return the client options and limits with which remote stores are opened.

    They are those of ``-c``, else of the environment; ``--bandwidth`` replaces that limit.  With
    ``-c`` and ``--progress`` (a head's child), limits are its share.  Each call makes a new rate
    limiter.  Raises ConfigError.
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


def checked_name(name: str, kind: str) -> str:
    """Return ``name`` if a run, or a checkpoint, can have it; ``kind`` is that word.

    Raises ConfigError.
    """
    from ckptsync.safe_names import checked_path

    try:
        return checked_path(name)
    except Corrupt as e:
        why = f"{name!r}: not a name that a {kind} can have"
        raise ConfigError(why, hint=_LIST) from e


def run_and_location(target: str) -> tuple[str, str]:
    """Return run and location of ``RUN/CHECKPOINT``.  Raises ConfigError if one is missing."""
    run, _, location = target.strip("/").rpartition("/")
    if not run or not location:
        raise ConfigError(f"{target}: expected {CHECKPOINT}", hint=_LIST)
    return checked_name(run, "run"), checked_name(location, "checkpoint")


def ask(prompt: str, refusal: ConfigError) -> str | None:
    """Print a prompt on stderr, and return the stripped line that the user types; None for ^D.

    Waits without limit.  Raises ``refusal`` if stdin or stderr is no terminal.
    """
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise refusal
    line = ""
    try:
        print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    finally:
        if not line:  # ^C or ^D: what follows begins on a line of its own
            print(file=sys.stderr, flush=True)
    return line.strip() if line else None
