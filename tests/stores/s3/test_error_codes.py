"""What S3's errors mean: the class, the exit code, what the operator reads."""

from __future__ import annotations

import http.client
import socket
import ssl
from typing import Any

import pytest

from ckptsync.errors import CkptsyncError, ConfigError, Exists, NotFound, StoreError, Transient
from ckptsync.stores.s3.error_codes import (
    Denied,
    Mismatch,
    NoSuchRange,
    Unable,
    UploadGone,
    error_of_answer,
    error_of_connection,
)
from ckptsync.stores.s3.transport import Lost

WHAT = "s3://bucket/key"


def answer(status: int, code: str, message: str = "", **headers: str) -> dict[str, Any]:
    """As botocore has it."""
    meta = {
        "HTTPStatusCode": status,
        "HTTPHeaders": {name.replace("_", "-"): value for name, value in headers.items()},
    }
    return {"Error": {"Code": code or str(status), "Message": message}, "ResponseMetadata": meta}


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (404, "NoSuchKey", NotFound),
        (404, "", NotFound),
        (404, "NoSuchBucket", ConfigError),
        (404, "NoSuchUpload", UploadGone),
        (412, "PreconditionFailed", Exists),
        (412, "", Exists),
        (409, "ConditionalRequestConflict", Transient),
        (409, "OperationAborted", Transient),
        (400, "InvalidPart", Mismatch),
        (416, "InvalidRange", NoSuchRange),
        (403, "AccessDenied", Denied),
        (403, "", Denied),
        (403, "InvalidAccessKeyId", ConfigError),
        (403, "SignatureDoesNotMatch", ConfigError),
        (400, "InvalidToken", ConfigError),
        (403, "InvalidObjectState", StoreError),
        (408, "", Transient),
        (400, "ExpiredToken", StoreError),
        (403, "RequestTimeTooSkewed", StoreError),
        (301, "PermanentRedirect", ConfigError),
        (400, "BadDigest", Transient),
        (400, "RequestTimeout", Transient),
        (503, "SlowDown", Transient),
        (503, "", Transient),
        (500, "InternalError", Transient),
        (429, "", Transient),
        (501, "NotImplemented", Unable),
        (507, "", StoreError),
        (403, "QuotaExceeded", StoreError),
        (400, "WhateverElse", StoreError),
        (405, "", StoreError),
    ],
)
def test_an_answer_is_of_one_class(status: int, code: str, error: type[CkptsyncError]) -> None:
    found = error_of_answer(WHAT, "PutObject", answer(status, code, "Some Words."))
    assert type(found) is error
    assert WHAT in str(found)
    assert isinstance(found, Transient) or found.hint or not isinstance(found, ConfigError)


def test_a_missing_permission_is_named() -> None:
    found = error_of_answer(
        WHAT, "UploadPart", answer(403, "AccessDenied", "User: me is not authorized")
    )
    assert (
        str(found)
        == "s3://bucket/key: permission denied: the server says 403 AccessDenied: User: me is not"
        " authorized"
    )
    assert found.hint == "the credentials need s3:PutObject here"
    assert found.exit_code == 4


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [("7", 7, 7), ("", 0, 0), ("nonsense", 0, 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0, 0)],
)
def test_a_busy_server_says_how_long(asked: str, least: float, most: float) -> None:
    found = error_of_answer(WHAT, "GetObject", answer(503, "SlowDown", retry_after=asked))
    assert isinstance(found, Transient)
    assert least <= found.after <= most


@pytest.mark.parametrize(
    ("e", "has_answered", "error", "words"),
    [
        (
            socket.gaierror(socket.EAI_NONAME, "x"),
            False,
            ConfigError,
            "no host is called h.example",
        ),
        (socket.gaierror(socket.EAI_NONAME, "x"), True, Transient, "connection"),
        (socket.gaierror(socket.EAI_AGAIN, "try again"), False, Transient, "try again"),
        (ConnectionRefusedError(111, "refused"), False, Transient, "refuses"),
        (ConnectionResetError(104, "Connection reset"), True, Transient, "connection reset"),
        (TimeoutError(), True, Transient, "silent"),
        (http.client.RemoteDisconnected("Remote end closed"), True, Transient, "remote end closed"),
        (http.client.IncompleteRead(b""), True, Transient, "ended early"),
        (ssl.SSLCertVerificationError(1, "bad"), False, ConfigError, "not trusted"),
        (FileNotFoundError(2, "no such file"), False, ConfigError, "certificates"),
    ],
)
def test_a_lost_connection_is_of_one_class(
    e: Exception, *, has_answered: bool, error: type[CkptsyncError], words: str
) -> None:
    if isinstance(e, ssl.SSLCertVerificationError):
        e.verify_message = "self-signed certificate"
    found = error_of_connection(WHAT, Lost("h.example", e), has_answered=has_answered)
    assert type(found) is error
    assert words in str(found)
