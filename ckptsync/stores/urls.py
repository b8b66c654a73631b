"""What a URL means: a path of this machine, or a location that a scheme's own program serves.

Users name stores by paths, ``file://`` URLs and URLs of many schemes, and secrets must not get into
messages. So every text is parsed here once, into a `Path` or a `Remote`, and refused if it is
neither, or has a password in it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ckptsync.errors import ConfigError, Unsupported

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ALMOST_URL = re.compile(r"[A-Za-z0-9+.@-]{2,}:(/|$)")  # s3:/bucket, host:/path


@dataclass(frozen=True, slots=True)
class Scheme:
    """A scheme of URLs that a store of our own serves; fsspec serves the others.

    ``name``: the same for several schemes with one meaning. ``has_buckets``: a URL begins with a
    bucket, else with a host. ``keeps_times``: files can have the times that they had where a
    trainer wrote them, since rsync and scp keep times.
    """

    name: str
    has_buckets: bool = False
    keeps_times: bool = False


_S3 = Scheme("s3", has_buckets=True)
_SFTP = Scheme("sftp", keeps_times=True)
SCHEMES: Mapping[str, Scheme] = {"s3": _S3, "s3a": _S3, "sftp": _SFTP, "ssh": _SFTP}
SCHEME_NAMES = tuple(dict.fromkeys(scheme.name for scheme in SCHEMES.values()))


@dataclass(frozen=True, slots=True)
class Remote:
    """A URL that is no path of this machine.

    ``scheme`` is in lower case; ``rest`` is the text after ``://``, without slashes at its end.
    """

    scheme: str
    rest: str

    @property
    def url(self) -> str:
        """The URL."""
        return f"{self.scheme}://{self.rest}"

    @property
    def kind(self) -> Scheme:
        """What is known of its scheme."""
        return SCHEMES.get(self.scheme, Scheme(self.scheme))


def located(url: str) -> Path | Remote:
    """Return the absolute path that a plain path or a ``file://`` URL means, or a remote URL.

    ``~`` is expanded, no link is resolved, and the path need not exist. Raise ConfigError if the
    text is neither, or has a password in it.
    """
    if not url or "\0" in url:
        raise ConfigError(f"{url!r}: a path or a URL of a store expected")
    if matched := _SCHEME.fullmatch(url):
        scheme, location = matched[1].lower(), matched[2]
        return (
            _path_of_file_url(url, location)
            if scheme == "file"
            else _parse_remote(url, scheme, location)
        )
    if _ALMOST_URL.match(url) and not Path(url).exists():
        raise ConfigError(
            f"{url}: neither a path nor a URL",
            hint="a URL has `://`; a path with a colon may start with `./`",
        )
    try:
        return Path(url).expanduser().absolute()
    except RuntimeError as e:
        raise ConfigError(f"{url}: no such user's home directory") from e


def shown_url(url: str) -> str:
    """Return a URL for a message; ``***`` if `located` refuses it: it may hold a password."""
    try:
        located(url)
    except ConfigError:
        return "***"
    return url


def path_of(url: str) -> str:
    """Return the absolute path that a plain path or a ``file://`` URL means.

    Raise Unsupported for other schemes, ConfigError.
    """
    target = located(url)
    if isinstance(target, Remote):
        raise Unsupported(f"{url}: expected a local path")
    return str(target)


def _parse_remote(url: str, scheme: str, location: str) -> Remote:
    """Return the URL, with the scheme ``s3`` for ``s3a``, and without slashes at its end.

    ``location`` is the text after ``://``. Raise ConfigError if it has a password or a control
    character, or if a scheme of `SCHEMES` has no bucket, host or path.
    """
    kind = SCHEMES.get(scheme, Scheme(scheme))
    if _has_password(location, is_bucket=kind.has_buckets):
        hint = (
            "change the password: shell history and process lists may show it; then use a"
            " profile, an agent or storage_options"
        )
        raise ConfigError(f"a {scheme}:// URL with a password in it", hint=hint)
    if (scheme in SCHEMES and not location.strip("/")) or any(ord(c) < 32 for c in location):
        raise ConfigError(
            f"{url!r}: no bucket, host or path in the URL",
            hint="such as s3://bucket/checkpoints or sftp://host/srv/checkpoints",
        )
    return Remote(kind.name, location.rstrip("/"))


def _has_password(location: str, *, is_bucket: bool) -> bool:
    """Return whether the text after a URL's scheme has a password in it.

    A bucket's name has no colon, except access points; a host has only the one before its port. A
    password may contain a slash, so that the host's part ends within it.
    """
    authority = re.split(r"[/?#]", location, maxsplit=1)[0]
    if is_bucket:
        return ":" in authority and not authority.startswith("arn:")
    user, _, host = authority.rpartition("@")
    return ":" in user or not re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?", host)


def _path_of_file_url(url: str, location: str) -> Path:
    """Return the path of a ``file://`` URL, unquoted; raise ConfigError if it names a host."""
    if not location.startswith("/"):
        raise ConfigError(
            f"{url}: names a host; expected an absolute path", hint=f"write file:///{location}"
        )
    return Path(unquote(location))
