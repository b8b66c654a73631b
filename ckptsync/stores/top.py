"""The files at the top of one directory, where configuration and tokenizer lie: a run may hold thousands of checkpoints below it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.model import Files


class _TopFiles:
    """Name → the path that holds it, and its size, as they were at construction."""

    def __init__(self, paths: Iterable[tuple[str, str]]) -> None:
        self._paths = dict(paths)
        self._sizes = {name: Path(path).lstat().st_size for name, path in sorted(self._paths.items())}

    def sizes(self) -> Mapping[str, int]:
        return self._sizes

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if name not in self._paths:
            raise Incomplete(f"{name}: not there")
        fd = os.open(self._paths[name], os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if os.preadv(fd, [out], start) < out.nbytes:
                raise Corrupt(f"{self._paths[name]}: became shorter while it was read")
        finally:
            os.close(fd)


def around(root: str) -> Files:
    """The regular files of a directory that was found, not named: links in it are not followed.  Raises ConfigError."""
    return _top(root, lambda entry: entry.path if entry.is_file(follow_symlinks=False) else "")


def named(root: str) -> Files:
    """The files of a directory that the operator named: links in it are followed, since a Hugging Face snapshot is made of them.

    Raises ConfigError.
    """
    return _top(root, lambda entry: os.path.realpath(entry.path) if entry.is_file() else "")


def _top(root: str, path_of: Callable[[os.DirEntry[str]], str]) -> Files:
    try:
        with os.scandir(root) as entries:
            return _TopFiles((entry.name, path) for entry in entries if (path := path_of(entry)))
    except OSError as e:
        hint = "a directory with config.json and tokenizer files is wanted"
        raise ConfigError(f"{root}: {(e.strerror or str(e)).lower()}", hint=hint) from e
