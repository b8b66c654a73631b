"""What a URL means: a path of this machine, or a location that a scheme's own program serves."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from ckptsync.errors import ConfigError, Unsupported

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_ALMOST_URL = re.compile(r"[A-Za-z0-9+.@-]{2,}:(/|$)")  # s3:/bucket, host:/path
S3 = frozenset({"s3", "s3a"})
SFTP = frozenset({"sftp", "ssh"})


@dataclass(frozen=True, slots=True)
class Remote:
    """A URL that is no path here.

    ``scheme`` in lower case; ``rest`` is what follows ``://``, without slashes at its end.
    """

    scheme: str
    rest: str

    @property
    def url(self) -> str:
        """The URL."""
        return f"{self.scheme}://{self.rest}"


def located(url: str) -> Path | Remote:
    """The absolute path that a plain path or a ``file://`` URL means, or a remote URL.

    Raises ConfigError.
    """
    if not url or "\0" in url:
        raise ConfigError(f"{url!r}: a path or a URL of a store expected")
    if found := _SCHEME.fullmatch(url):
        scheme, rest = found[1].lower(), found[2]
        return _path_of_file_url(url, rest) if scheme == "file" else _remote(url, scheme, rest)
    if _ALMOST_URL.match(url) and not Path(url).exists():
        raise ConfigError(
            f"{url}: neither a path nor a URL",
            hint="a URL has `://`; a path with a colon may start with `./`",
        )
    try:
        return Path(url).expanduser().absolute()
    except RuntimeError as e:
        raise ConfigError(f"{url}: no such user's home directory") from e


def path_of(url: str) -> str:
    """The absolute path that a plain path or a ``file://`` URL means.

    Raises Unsupported for other schemes, ConfigError.
    """
    target = located(url)
    if isinstance(target, Remote):
        raise Unsupported(f"{url}: expected a local path")
    return str(target)


def _remote(url: str, scheme: str, rest: str) -> Remote:
    if _has_password(scheme, rest):
        hint = (
            "change the password: shell history and process lists may show it; then use a"
            " profile, an agent or storage_options"
        )
        raise ConfigError(f"a {scheme}:// URL with a password in it", hint=hint)
    is_empty = scheme in S3 | SFTP and not rest.strip("/")
    if is_empty or any(ord(c) < 32 for c in rest):
        raise ConfigError(
            f"{url!r}: no bucket, host or path in the URL",
            hint="such as s3://bucket/checkpoints or sftp://host/srv/checkpoints",
        )
    return Remote("s3" if scheme in S3 else "sftp" if scheme in SFTP else scheme, rest.rstrip("/"))


def _has_password(scheme: str, rest: str) -> bool:
    """Return whether the text after a URL's scheme has a password in it.

    A bucket's name has no colon, except access points; a host has only the one before its port. A
    password may have a slash, and the first part then ends there.
    """
    first = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if scheme in S3:
        return ":" in first and not first.startswith("arn:")
    user, _, host = first.rpartition("@")
    return ":" in user or not re.fullmatch(r"(\[[^\]]*\]|[^:]*)(:[0-9]*)?", host)


def _path_of_file_url(url: str, rest: str) -> Path:
    if not rest.startswith("/"):
        raise ConfigError(
            f"{url}: names a host; expected an absolute path", hint=f"write file:///{rest}"
        )
    return Path(unquote(rest))
