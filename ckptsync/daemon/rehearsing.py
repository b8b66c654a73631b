"""What would keep a process from beginning with a configuration, seen from one that runs: it does not end at SIGHUP for what would not start again."""

from __future__ import annotations

from pathlib import Path

from ckptsync.config.loading import limits_of, options_for
from ckptsync.config.runs import output_directories
from ckptsync.config.schema import Config
from ckptsync.errors import ConfigError
from ckptsync.stores.opening import bare
from ckptsync.stores.urls import located


def rehearsed(config: Config) -> Config:
    """``config`` itself; raises ConfigError or Unsupported.  The store is not asked: one that is away comes back."""
    url = config.store.url
    location, options = located(url), options_for(url, config.store.options)
    if not isinstance(location, Path) or location.is_dir():
        bare(url, options, limits_of(config.limits))
    elif location.exists():
        raise ConfigError(f"{url}: a file, a store's directory wanted", hint="is the path right?")
    found = output_directories(config.worker.runs, url) if "worker" in config.roles else None
    if found and found.problems and not found.runs:
        raise ConfigError("; ".join(found.problems), hint="see worker.runs in the configuration")
    return config
