"""Turn S3's error codes, and the network's errors, into StoreErrors.

Callers need to know one thing of a failure: try again, change the configuration, or give up; users
need a hint. A table maps codes (docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html, and
other servers' documents) to error types and hints. Messages name the location, the status and the
server's text, and never a request's query or signature.
"""

from __future__ import annotations

import http.client
import re
import socket
import ssl
from collections.abc import Mapping
from typing import Any

from ckptsync.errors import CkptsyncError, ConfigError, Exists, NotFound, StoreError, Transient
from ckptsync.stores.s3.transport import Lost


class UploadGone(StoreError):
    """The multipart upload does not exist: completed or removed, perhaps by a request of ours."""


class Mismatch(StoreError):
    """The server's parts are not those that should be completed."""


class NoSuchRange(StoreError):
    """A file ends before the requested range."""


class Denied(StoreError):
    """The credentials do not permit the request."""


class Unable(StoreError):
    """The server does not implement the request."""


_ELSEWHERE = "credentials are sent to no other host: correct endpoint_url, or the region"
_REGION = "set client_kwargs: region_name to the bucket's region"
_BUSY = "the server is busy, has failed or is full: see its log"
_TEMPORARY = (
    "5xx 408 429 RequestTimeout Throttling ThrottlingException KMS.ThrottlingException"
    " RequestLimitExceeded OperationAborted ConditionalRequestConflict IncompleteBody BadDigest"
    " XAmzContentSHA256Mismatch XAmzContentChecksumMismatch"
)
# codes and statuses; an answer's code is looked up first, then its status, then 4xx and the like
_ROWS: tuple[tuple[str, type[CkptsyncError], str], ...] = (
    ("NoSuchUpload", UploadGone, ""),
    ("InvalidPart InvalidPartOrder", Mismatch, "another writer uses the same name: try again"),
    ("416 InvalidRange", NoSuchRange, ""),
    ("501 NotImplemented", Unable, "this server cannot do it"),
    ("NoSuchBucket InvalidBucketName", ConfigError, "make the bucket, or correct its name"),
    ("InvalidAccessKeyId", ConfigError, "correct the key, or the profile it is taken from"),
    ("SignatureDoesNotMatch", ConfigError, "correct the secret; or a proxy changes requests"),
    ("InvalidToken InvalidSecurity", ConfigError, "correct the credentials, or the session token"),
    ("AuthorizationHeaderMalformed PermanentRedirect", ConfigError, _REGION),
    ("IllegalLocationConstraintException", ConfigError, _REGION),
    ("ExpiredToken TokenRefreshRequired RequestExpired", StoreError, "new credentials are needed"),
    ("RequestTimeTooSkewed", StoreError, "set this machine's clock"),
    ("507 QuotaExceeded XMinioStorageFull", StoreError, "make room, or raise the quota"),
    ("InvalidObjectState", StoreError, "restore it from the archive first"),
    ("302 303 307", Transient, _ELSEWHERE),
    ("3xx", StoreError, _ELSEWHERE),
    ("4xx", StoreError, "check that endpoint_url names an S3 server that can do this"),
    (_TEMPORARY, Transient, _BUSY),
)
_ERRORS = {code: (kind, hint) for codes, kind, hint in _ROWS for code in codes.split()}
_NO_CERTIFICATES = ("NO_CERTIFICATE_OR_CRL_FOUND", "PEM_LIB", "NO_START_LINE")
_NO_TLS = ("WRONG_VERSION_NUMBER", "PACKET_LENGTH_TOO_LONG", "RECORD_LAYER_FAILURE")
# permissions of operations whose permission has another name
_PERMISSIONS = {
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "ListParts": "ListMultipartUploadParts",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
}


def error_of_answer(url: str, operation: str, answer: Mapping[str, Any]) -> CkptsyncError:
    """Return the error for an answer that refuses ``operation`` on ``url``.

    Exists and NotFound for an object's own state, Denied, or what the table says; a Transient error
    waits as the answer's Retry-After says.
    """
    meta, error = answer["ResponseMetadata"], answer.get("Error") or {}
    status, code = meta["HTTPStatusCode"], str(error.get("Code") or "")[:100]
    code = "" if code.isdigit() else code
    if code in ("NoSuchKey", "NoSuchVersion") or (status == 404 and not code):
        return NotFound(f"{url}: not found")
    if code == "PreconditionFailed" or (status == 412 and not code):
        return Exists(f"{url}: already there")
    message = " ".join(str(error.get("Message") or "").split())[:200].rstrip(".")
    reason = f"the server says {status} {code}".rstrip() + (f": {message}" if message else "")
    if status == 403 and code not in _ERRORS:
        permission = _PERMISSIONS.get(operation, operation)
        hint = f"the credentials need s3:{permission} here"
        return Denied(f"{url}: permission denied: {reason}", hint=hint)
    keys = (code, str(status), f"{status // 100}xx")
    kind, hint = next((_ERRORS[key] for key in keys if key in _ERRORS), (StoreError, ""))
    store_error = kind(f"{url}: {reason}", hint=hint)
    after = meta["HTTPHeaders"].get("retry-after", "").strip()
    if isinstance(store_error, Transient) and re.fullmatch("[0-9]{1,6}", after):
        store_error.after = float(after)
    return store_error


def malformed_answer(url: str, reason: object) -> Transient:
    """Return the error for an answer that is not S3's, with the reason."""
    text = " ".join(str(reason).split())[:200]
    return Transient(
        f"{url}: the server's answer is not S3's: {text}",
        hint="check that endpoint_url names an S3 server and that no proxy answers instead",
    )


def error_of_connection(url: str, lost: Lost, *, has_answered: bool) -> CkptsyncError:
    """Return the error for a connection to ``url`` that was not made, or broke.

    ``has_answered``: the server has answered before, in this process. Then only certificates are a
    ConfigError; before, an unknown host or no TLS is, too. Other errors are Transient.
    """
    e, host = lost.error, lost.host
    why = str(getattr(e, "reason", "")) if isinstance(e, ssl.SSLError) else ""  # OpenSSL's name
    hint = "AWS_CA_BUNDLE, or client_kwargs: verify, names the certificates to trust"
    if isinstance(e, FileNotFoundError) or why in _NO_CERTIFICATES:
        return ConfigError(f"{url}: certificates cannot be read: {e}", hint=hint)
    if isinstance(e, ssl.SSLCertVerificationError):
        return ConfigError(f"{url}: {host} is not trusted: {e.verify_message}", hint=hint)
    if not has_answered:
        hint = "correct endpoint_url: its scheme, host or port, or the region"
        if why in _NO_TLS:
            return ConfigError(f"{url}: {host} does not speak TLS", hint=hint)
        if isinstance(e, socket.gaierror) and e.errno == socket.EAI_NONAME:
            return ConfigError(f"{url}: no host is called {host}", hint=hint)
        if isinstance(e, ConnectionRefusedError):
            hint = "check that the server runs, and endpoint_url"
            return Transient(f"{url}: {host} refuses connections", hint=hint)
    hint = "the network or the server failed"
    if isinstance(e, TimeoutError):
        return Transient(f"{url}: {host} was silent for too long", hint=hint)
    reason = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
    kind = "ended early" if isinstance(e, http.client.HTTPException) else "broke"
    return Transient(f"{url}: the connection to {host} {kind}: {reason.lower()}", hint=hint)
