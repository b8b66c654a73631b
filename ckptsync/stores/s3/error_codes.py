"""Make our errors of S3's, and of the network's.

Source of the codes: docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; of those of
others, their own documents. Messages name the location, the status and what the server says;
nothing of a request's query or signature is among them.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import re
import socket
import ssl
import time
from collections.abc import Mapping
from typing import Any

from ckptsync.errors import CkptsyncError, ConfigError, Exists, NotFound, StoreError, Transient
from ckptsync.stores.s3.transport import Lost

ACTIONS = {
    "put_object": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_multipart_upload": "s3:PutObject",
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "list_parts": "s3:ListMultipartUploadParts",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_objects_v2": "s3:ListBucket",
    "delete_object": "s3:DeleteObject",
}
"""The permission that each method of the client needs."""

# with a status below 500
_TRANSIENT = frozenset(
    {
        *("RequestTimeout", "RequestTimeoutException", "PriorRequestNotComplete"),
        *("Throttling", "ThrottlingException", "KMS.ThrottlingException", "RequestLimitExceeded"),
        *("OperationAborted", "ConditionalRequestConflict", "IncompleteBody", "BadDigest"),
        *("XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"),
    }
)
_ELSEWHERE = (
    "a redirect is not followed, since credentials are sent to no other host: set endpoint_url, or"
    " client_kwargs: region_name, to where the bucket is"
)
_NO_TLS = (
    *("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"),
    *("PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE"),
)
_NO_CERTIFICATES = ("NO_CERTIFICATE_OR_CRL_FOUND", "PEM_LIB", "NO_START_LINE")


class UploadGone(StoreError):
    """Raised if the multipart upload was not found.

    Somebody else, or a request of ours whose answer was lost, completed or removed it.
    """


class Mismatch(StoreError):
    """Raised if the server's parts are not those to be completed.

    Another writer has sent parts meanwhile.
    """


class NoSuchRange(StoreError):
    """A file ends before the range that was asked for."""


class Denied(StoreError):
    """Permission denied to these credentials."""


class Unable(StoreError):
    """The server does not know what it was asked for."""


_NEWER_KEYS = "new credentials are needed; those of a role or a profile are renewed without asking"
_OTHER_PARTS = "another writer uses the same name; the next try sends what differs"
_REGION = "set client_kwargs: region_name to the bucket's region"
_ROOM = "make room on the server"
_ERRORS: Mapping[str, tuple[type[CkptsyncError], str]] = {
    "InvalidRange": (NoSuchRange, ""),
    "NoSuchUpload": (UploadGone, ""),
    "InvalidPart": (Mismatch, _OTHER_PARTS),
    "InvalidPartOrder": (Mismatch, _OTHER_PARTS),
    "NotImplemented": (Unable, "this server cannot do it"),
    "NoSuchBucket": (ConfigError, "make the bucket, or correct its name"),
    "InvalidBucketName": (ConfigError, "correct the bucket's name"),
    "InvalidAccessKeyId": (ConfigError, "correct the key, or the profile it is taken from"),
    "SignatureDoesNotMatch": (
        ConfigError,
        "correct the secret; a proxy that changes requests would do this, too",
    ),
    "InvalidToken": (ConfigError, "correct the session token"),
    "InvalidSecurity": (ConfigError, "correct the credentials"),
    "AuthorizationHeaderMalformed": (ConfigError, _REGION),
    "PermanentRedirect": (ConfigError, _REGION),
    "IllegalLocationConstraintException": (ConfigError, _REGION),
    "ExpiredToken": (StoreError, _NEWER_KEYS),
    "TokenRefreshRequired": (StoreError, _NEWER_KEYS),
    "RequestExpired": (StoreError, _NEWER_KEYS),
    "RequestTimeTooSkewed": (StoreError, "set this machine's clock"),
    "QuotaExceeded": (StoreError, "raise the quota, or make room"),
    "InsufficientStorage": (StoreError, _ROOM),
    "XMinioStorageFull": (StoreError, _ROOM),
    "InvalidObjectState": (StoreError, "restore it from the archive first"),
    "EntityTooLarge": (StoreError, "this server takes no parts of that size"),
}
_OF_STATUS = {416: "InvalidRange", 501: "NotImplemented", 507: "InsufficientStorage"}


def of_answer(what: str, method: str, answer: Mapping[str, Any]) -> CkptsyncError:
    """Return the error for an answer of botocore's that is none: ``what`` is the thing's URL."""
    status, headers, code, message = parse_error(answer)
    code = code or {404: "NoSuchKey", 412: "PreconditionFailed", 403: "AccessDenied"}.get(
        status, ""
    )
    reason = _server_message(status, code, message)
    text = f"{what}: {reason}"
    if code in ("NoSuchKey", "NoSuchVersion"):
        return NotFound(f"{what}: not found")
    if code == "PreconditionFailed":
        return Exists(f"{what}: already there")
    if found := _ERRORS.get(code) or _ERRORS.get(_OF_STATUS.get(status, "")):
        kind, hint = found
        return kind(text, hint=hint)
    if code in _TRANSIENT or status >= 500 or status in (408, 429):
        hint = "the server is busy, has failed or is full: see its log"
        return Transient(text, hint=hint, after=_after(headers))
    if status in (302, 303, 307):
        return Transient(text, hint=_ELSEWHERE)
    if status == 403:
        hint = f"the credentials need {ACTIONS.get(method, method)} here"
        return Denied(f"{what}: permission denied: {reason}", hint=hint)
    if status < 400:
        return StoreError(text, hint=_ELSEWHERE)
    return StoreError(
        text, hint="" if code else "check that the endpoint is right and an S3 server"
    )


def parse_error(answer: Mapping[str, Any]) -> tuple[int, Mapping[str, str], str, str]:
    """Return status, headers (in lower case), code and message of an answer that is an error."""
    meta, error = answer["ResponseMetadata"], answer.get("Error") or {}
    code = str(error.get("Code") or "")[:100]
    return (
        meta["HTTPStatusCode"],
        meta["HTTPHeaders"],
        "" if code.isdigit() else code,
        str(error.get("Message") or ""),
    )


def not_s3(what: str, why: object) -> Transient:
    """Return the error for an answer that cannot be read."""
    text = " ".join(str(why).split())[:200]
    return Transient(
        f"{what}: the server's answer is not S3's: {text}",
        hint="check that endpoint_url names an S3 server and that no proxy answers instead",
    )


def of_connection(what: str, lost: Lost, *, has_answered: bool) -> CkptsyncError:
    """Return the error for a lost connection.

    ``has_answered``: the server was there before, in this process.
    """
    e, host = lost.error, lost.host
    if isinstance(e, FileNotFoundError) or (
        isinstance(e, ssl.SSLError) and getattr(e, "reason", "") in _NO_CERTIFICATES
    ):
        return ConfigError(
            f"{what}: certificates cannot be read: {e}",
            hint="see AWS_CA_BUNDLE and client_kwargs: verify",
        )
    if isinstance(e, ssl.SSLCertVerificationError):
        hint = "AWS_CA_BUNDLE, or client_kwargs: verify, names the certificates to trust"
        return ConfigError(f"{what}: {host} is not trusted: {e.verify_message}", hint=hint)
    if isinstance(e, ssl.SSLError) and getattr(e, "reason", "") in _NO_TLS and not has_answered:
        return ConfigError(
            f"{what}: {host} does not speak TLS",
            hint="correct endpoint_url: its scheme, or its port",
        )
    if isinstance(e, socket.gaierror) and e.errno == socket.EAI_NONAME and not has_answered:
        return ConfigError(
            f"{what}: no host is called {host}", hint="correct endpoint_url, or the region"
        )
    if isinstance(e, TimeoutError):
        return Transient(
            f"{what}: {host} was silent for too long", hint="the network or the server is stuck"
        )
    if isinstance(e, ConnectionRefusedError) and not has_answered:
        return Transient(
            f"{what}: {host} refuses connections",
            hint="check that the server runs, and endpoint_url",
        )
    reason = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
    kind = "ended early" if isinstance(e, http.client.HTTPException) else "broke"
    return Transient(
        f"{what}: the connection to {host} {kind}: {reason.lower()}",
        hint="the network or the server failed",
    )


def _server_message(status: int, code: str, message: str) -> str:
    reason = " ".join(message.split())[:200].rstrip(".")
    return f"the server says {status} {code}".rstrip() + (f": {reason}" if reason else "")


def _after(headers: Mapping[str, str]) -> float:
    """Seconds that the server asks for (RFC 9110, section 10.2.3), a number or a date."""
    asked = headers.get("retry-after", "").strip()
    if re.fullmatch("[0-9]{1,6}", asked):
        return float(asked)
    date = http_date(asked)
    return max(0.0, date - time.time()) if date else 0.0


def http_date(text: str) -> float | None:
    """Return seconds since 1970; None for what is no date of this century."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        date = email.utils.parsedate_to_datetime(text)
        return date.timestamp() if 2000 < date.year < 2100 else None
    return None
