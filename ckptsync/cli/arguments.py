"""The parser, arguments that several commands have, and the store that a command line names.

Stores are imported where one is opened: ``ckptsync --help`` answers at once.
"""

from __future__ import annotations

import argparse
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptsync.cli import output
from ckptsync.errors import ConfigError, Corrupt

if TYPE_CHECKING:
    from ckptsync.config.schema import Config
    from ckptsync.stores.contract import Store
    from ckptsync.stores.opening import Access

T = TypeVar("T")
EXIT_CODES = """\
exit codes:
  0    success
  1    failure
  2    usage or configuration error
  3    incomplete: something is missing
  4    store, disk or network error
  5    unsupported layout or version
  10   corrupt: a checksum or a format does not match
  130  interrupted (143: terminated)
"""
_PATHS = ("/", "./", "../", "~/")  # how a path begins that can be no run's name
_STORE_HELP = "the store (default: the store of -c, or $CKPTSYNC_STORE)"
# variables that say how stores are opened
_OF_STORES = ("CKPTSYNC_LIMITS_", "CKPTSYNC_STORAGE_OPTIONS")


class Parser(argparse.ArgumentParser):
    """Accepts an optional URL also after flags.

    Argparse alone gives it up when it meets a flag before it.
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse the arguments; one word that is left over is the URL where none was found."""
        found, rest = super().parse_known_args(args, namespace)
        if len(rest) == 1 and not rest[0].startswith("-") and getattr(found, "url", "") is None:
            found.url = rest.pop()
        return found, rest


def add_command(
    commands: Any, name: str, summary: str, details: str = ""
) -> argparse.ArgumentParser:
    """Add a command (or an action of one) with ``--json`` and the exit codes.

    ``summary`` is a phrase without a full stop.
    """
    text = f"{summary[0].upper()}{summary[1:]}. {details}"
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description="\n".join(textwrap.fill(line, 80) for line in text.splitlines()),
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command.add_argument(
        "--json",
        action="store_true",
        default=argparse.SUPPRESS,
        help="print the result as JSON on stdout, and errors as JSON on stderr",
    )
    return command


def add_dry_run(command: argparse.ArgumentParser, does: str) -> None:
    """Add ``--dry-run`` to a command that ``does`` something."""
    command.add_argument("--dry-run", action="store_true", help=f"only say what would be {does}")


def add_store(command: argparse.ArgumentParser) -> None:
    """Add the store as an optional argument."""
    command.add_argument("url", metavar="URL", nargs="?", help=_STORE_HELP)
    add_config(command)


def add_store_option(command: argparse.ArgumentParser) -> None:
    """Add the store as an option, for commands whose arguments are checkpoints."""
    command.add_argument("--store", metavar="URL", dest="url", help=_STORE_HELP)
    add_config(command)


def add_config(command: argparse.ArgumentParser) -> None:
    """Add ``-c``."""
    command.add_argument(
        "-c", "--config", metavar="CONFIG", help="a configuration file that names the store"
    )


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
    """Return the URL of the store: of the command line, ``-c``, or CKPTSYNC_STORE.

    Raises ConfigError if none names one.
    """
    config = configuration(args)
    if config and args.url:
        raise ConfigError(
            f"{args.url}: a store and a configuration are given", hint="give one of them"
        )
    url: str = config.store.url if config else args.url or os.environ.get("CKPTSYNC_STORE", "")
    if not url:
        raise ConfigError(
            "no store is named", hint="give its URL, a configuration with -c, or set CKPTSYNC_STORE"
        )
    return url


def store_and_name(
    args: argparse.Namespace, what: str, *, may_be_store: bool = False
) -> tuple[Store, str]:
    """Return the store of a command, and the ``RUN[/CHECKPOINT]`` in it that ``what`` names.

    ``what`` is such a name, or a URL or path of it in a store; a path that has none of the marks of
    one (``/``, ``./``, ``../``) only where no other store is named.  ``may_be_store``: it may also
    be the store itself, and the name is empty then.  Raises ConfigError, StoreError.
    """
    is_marked = "://" in what or what in (".", "..") or what.startswith(_PATHS)
    is_named = bool(args.url or getattr(args, "config", None))
    if is_marked and is_named:
        why = f"{what}: names a store, and another store is given"
        raise ConfigError(why, hint="give one of them")
    if not what or (not is_marked and (is_named or "CKPTSYNC_STORE" in os.environ)):
        return named_store(args), what
    from ckptsync.safe_names import CONSOLIDATED, RECORDS
    from ckptsync.stores.file_sources import enclosing_store
    from ckptsync.stores.urls import located

    found = enclosing_store(located(what), access_of(args))
    if found is None:
        where = "not inside a store" if is_marked else "no store is named, and this lies in none"
        hint = (
            "name a run, and its store with --store, -c or CKPTSYNC_STORE; or give the URL of a run"
            " in a store"
        )
        raise ConfigError(f"{what}: {where}", hint=hint)
    store, parts = found
    if not (parts or may_be_store):
        why = f"{what}: names a store, but no run in it"
        raise ConfigError(why, hint="`ckptsync ls` lists the runs")
    # the directories of consolidated models and of records stand for their checkpoint
    return store, "/".join(part for part in parts if part not in (CONSOLIDATED, RECORDS))


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
    else:  # options of the environment are for remote stores; a path refuses its configuration's
        options = access.options if configuration(args) else {}
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
        raise ConfigError(why, hint="`ckptsync ls` lists the checkpoints") from e


def run_and_location(what: str) -> tuple[str, str]:
    """Return run and location of ``RUN/CHECKPOINT``.  Raises ConfigError."""
    run, _, location = what.strip("/").rpartition("/")
    if not run or not location:
        why = f"{what}: expected RUN/CHECKPOINT"
        raise ConfigError(why, hint="`ckptsync ls` lists the checkpoints")
    return checked_name(run, "run"), checked_name(location, "checkpoint")
