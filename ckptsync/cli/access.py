"""The store that a command line names, and the options and limits it is opened with."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckptsync.cli import output
from ckptsync.errors import ConfigError, Corrupt
from ckptsync.safe_names import checked_path
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import Access, open_store
from ckptsync.stores.urls import Remote, located

if TYPE_CHECKING:
    from ckptsync.config.schema import Config

_STORE_HELP = "the store (default: the store of -c, or $CKPTSYNC_STORE)"
# variables that say how stores are opened
_OF_STORES = ("CKPTSYNC_LIMITS_", "CKPTSYNC_STORAGE_OPTIONS")


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


def named_store(args: argparse.Namespace, opened: Callable[..., Store] = open_store) -> Store:
    """Return the store of `store_url`, opened by `open_store` or `create_store`.

    Raises ConfigError, StoreError.
    """
    url, access = store_url(args), access_of(args)
    where = located(url)
    if isinstance(where, Remote):
        return opened(url, access.options_of(where), access.limits)
    # options of the environment are for remote stores; options in a path's own configuration are
    # refused
    return opened(url, access.options if configuration(args) else {}, access.limits)


def access_of(args: argparse.Namespace) -> Access:
    """Return how remote stores are opened, by ``-c``, ``--bandwidth`` or the environment.

    Raises ConfigError.
    """
    config, bandwidth = configuration(args), getattr(args, "bandwidth", None)
    if (
        not config
        and bandwidth is None
        and not any(name.startswith(_OF_STORES) for name in os.environ)
    ):
        return Access()
    from ckptsync.config import loading, readers

    options, limits = (
        (config.store.options, config.limits) if config else loading.from_environment()
    )
    if bandwidth is not None:
        try:
            limits = replace(limits, bandwidth=readers.bandwidth(bandwidth))
        except ValueError as e:
            raise ConfigError(f"--bandwidth: {e}") from e
    return Access(options, loading.limits_of(limits))


def checked_name(name: str, what: str) -> str:
    """Return ``name`` if ``what`` (a run, or a checkpoint) can have such a name.

    Raises ConfigError.
    """
    try:
        return checked_path(name)
    except Corrupt as e:
        raise ConfigError(
            f"{name!r}: not a name that a {what} can have",
            hint="`ckptsync ls` lists the checkpoints",
        ) from e


def run_and_location(what: str) -> tuple[str, str]:
    """Return run and location of ``RUN/CHECKPOINT``.  Raises ConfigError."""
    run, _, location = what.strip("/").rpartition("/")
    if not run or not location:
        raise ConfigError(
            f"{what}: expected RUN/CHECKPOINT", hint="`ckptsync ls` lists the checkpoints"
        )
    return checked_name(run, "run"), checked_name(location, "checkpoint")
