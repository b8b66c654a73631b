"""What the back ends of fsspec raise, as our errors.  Pure.

They say it in many ways: an errno, an HTTP status, the name of a class.  Their messages may hold tokens and presigned URLs, so none is repeated.
"""

from __future__ import annotations

import errno

from ckptsync.errors import Exists, NotFound, StoreError, Transient
from ckptsync.stores.oserrors import HINTS

_PASSING = frozenset(  # of httpx, aiohttp, requests, Azure's and Google's clients, webdav4
    {
        "TransportError",
        "TimeoutException",
        "ClientConnectionError",
        "ServerTimeoutError",
        "ServiceRequestError",
        "ServiceResponseError",
    }
    | {"ConnectionError", "Timeout", "ChunkedEncodingError", "RetryError", "BadGatewayError", "ResourceLocked", "FSTimeoutError"}
)
_ABSENT = frozenset({"ResourceNotFound", "ResourceNotFoundError", "NoSuchKey"})
_FULL = frozenset({"InsufficientStorage"})
_FINAL = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.EINVAL, errno.ENOTEMPTY}
)
_DENIED = "the credentials in storage_options, or in the back end's own configuration, may not do this"


def sorted_error(where: str, e: Exception) -> StoreError:
    """The StoreError for what happened at ``where`` (the store and a name)."""
    names = {cls.__name__ for cls in type(e).__mro__}
    status = _status(e)
    if isinstance(e, (FileNotFoundError, NotADirectoryError, IsADirectoryError)) or status == 404 or names & _ABSENT:
        return NotFound(f"{where}: not there")
    if "ResourceAlreadyExists" in names:  # webdav4's, where nothing may be replaced
        return Exists(f"{where}: already there")
    if isinstance(e, FileExistsError):
        return StoreError(f"{where}: a file stands where a directory should be, or a directory where a file should be")
    if isinstance(e, PermissionError) or status in (401, 403):
        return StoreError(f"{where}: permission denied", hint=_DENIED)
    if status == 507 or names & _FULL:
        return StoreError(f"{where}: no room", hint=HINTS[errno.ENOSPC])
    if isinstance(e, NotImplementedError):
        return StoreError(f"{where}: this kind of store cannot do that", hint="some of fsspec's file systems can only be read")
    if status is not None and (status in (408, 423, 425, 429) or status >= 500):
        return Transient(f"{where}: the server answered {status}")
    if isinstance(e, OSError) and e.errno in _FINAL:
        return StoreError(f"{where}: {(e.strerror or '').lower()}", hint=HINTS.get(e.errno, ""))
    if isinstance(e, (OSError, TimeoutError, EOFError)) or names & _PASSING:
        return Transient(f"{where}: {_said(e)}")
    return StoreError(f"{where}: {_said(e)}" + (f" (HTTP {status})" if status else ""))


def _status(e: Exception) -> int | None:
    found = next((v for k in ("status_code", "status", "code") if isinstance(v := getattr(e, k, None), int)), None)
    return found if found is not None and 100 <= found < 600 else None


def _said(e: Exception) -> str:
    """The operating system's words, or the name of the class alone."""
    return e.strerror.lower() if isinstance(e, OSError) and isinstance(e.strerror, str) else f"failed with {type(e).__name__}"
