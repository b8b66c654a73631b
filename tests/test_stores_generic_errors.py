from __future__ import annotations

import errno

import pytest

from ckptsync.errors import NotFound, StoreError, Transient
from ckptsync.stores.generic.errors import sorted_error


class HTTPError(Exception):
    def __init__(self, status: int) -> None:
        super().__init__("https://host/x?sig=hunter2")
        self.status_code = status


class TransportError(Exception):
    pass


class ConnectTimeout(TransportError):
    pass


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (FileNotFoundError("x"), NotFound, "not there"),
        (NotADirectoryError("x"), NotFound, "not there"),
        (HTTPError(404), NotFound, "not there"),
        (PermissionError("x"), StoreError, "permission denied"),
        (HTTPError(403), StoreError, "permission denied"),
        (HTTPError(401), StoreError, "permission denied"),
        (HTTPError(507), StoreError, "no room"),
        (HTTPError(400), StoreError, "HTTP 400"),
        (HTTPError(429), Transient, "answered 429"),
        (HTTPError(503), Transient, "answered 503"),
        (OSError(errno.ENOSPC, "No space left on device"), StoreError, "no space left"),
        (OSError(errno.ECONNRESET, "Connection reset by peer"), Transient, "reset by peer"),
        (ConnectionRefusedError(111, "Connection refused"), Transient, "refused"),
        (TimeoutError(), Transient, "TimeoutError"),
        (ConnectTimeout("hunter2"), Transient, "ConnectTimeout"),
        (NotImplementedError(), StoreError, "cannot do that"),
        (FileExistsError("x"), StoreError, "stands where"),
        (RuntimeError("hunter2"), StoreError, "RuntimeError"),
        (KeyError("hunter2"), StoreError, "KeyError"),
    ],
)
def test_each_is_permanent_or_passing_and_repeats_no_message(error: Exception, kind: type[StoreError], said: str) -> None:
    found = sorted_error("gs://b/x", error)
    assert type(found) is kind
    assert str(found).startswith("gs://b/x: ")
    assert said in str(found)
    assert "hunter2" not in str(found) + found.hint
