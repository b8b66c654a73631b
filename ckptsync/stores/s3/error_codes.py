"""Make our errors of S3's, and of the network's.

Source of the codes: docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html; of those of
others, their own documents. Messages name the location, the status and what the server says;
nothing of a request's query or signature is among them.
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
    """The multipart upload is not there: completed or removed, perhaps by a request of ours."""


class Mismatch(StoreError):
    """The server's parts are not those to be completed."""


class NoSuchRange(StoreError):
    """A file ends before the range that was asked for."""


class Denied(StoreError):
    """Permission denied to these credentials."""


class Unable(StoreError):
    """The server does not know what it was asked for."""


_ELSEWHERE = "credentials are sent to no other host: correct endpoint_url, or the region"
_REGION = "set client_kwargs: region_name to the bucket's region"
_BUSY = "the server is busy, has failed or is full: see its log"
_TEMPORARY = (
    "5xx 408 429 RequestTimeout Throttling ThrottlingException KMS.ThrottlingException"
    " RequestLimitExceeded OperationAborted ConditionalRequestConflict IncompleteBody BadDigest"
    " XAmzContentSHA256Mismatch XAmzContentChecksumMismatch"
)
# codes, then the status that decides where the code is another, or none, then its hundred
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
_PERMISSIONS = {  # of operations that need another than their own name
    "CreateMultipartUpload": "PutObject",
    "UploadPart": "PutObject",
    "CompleteMultipartUpload": "PutObject",
    "ListParts": "ListMultipartUploadParts",
    "ListMultipartUploads": "ListBucketMultipartUploads",
    "HeadObject": "GetObject",
    "ListObjectsV2": "ListBucket",
}


def of_answer(what: str, operation: str, answer: Mapping[str, Any]) -> CkptsyncError:
    """Return the error for an answer of botocore's that is none: ``what`` is the thing's URL."""
    meta, error = answer["ResponseMetadata"], answer.get("Error") or {}
    status, code = meta["HTTPStatusCode"], str(error.get("Code") or "")[:100]
    code = "" if code.isdigit() else code
    if code in ("NoSuchKey", "NoSuchVersion") or (status == 404 and not code):
        return NotFound(f"{what}: not found")
    if code == "PreconditionFailed" or (status == 412 and not code):
        return Exists(f"{what}: already there")
    message = " ".join(str(error.get("Message") or "").split())[:200].rstrip(".")
    reason = f"the server says {status} {code}".rstrip() + (f": {message}" if message else "")
    if status == 403 and code not in _ERRORS:
        permission = _PERMISSIONS.get(operation, operation)
        hint = f"the credentials need s3:{permission} here"
        return Denied(f"{what}: permission denied: {reason}", hint=hint)
    keys = (code, str(status), f"{status // 100}xx")
    kind, hint = next((_ERRORS[key] for key in keys if key in _ERRORS), (StoreError, ""))
    made = kind(f"{what}: {reason}", hint=hint)
    after = meta["HTTPHeaders"].get("retry-after", "").strip()
    if isinstance(made, Transient) and re.fullmatch("[0-9]{1,6}", after):
        made.after = float(after)
    return made


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
    why = str(getattr(e, "reason", "")) if isinstance(e, ssl.SSLError) else ""  # OpenSSL's name
    hint = "AWS_CA_BUNDLE, or client_kwargs: verify, names the certificates to trust"
    if isinstance(e, FileNotFoundError) or why in _NO_CERTIFICATES:
        return ConfigError(f"{what}: certificates cannot be read: {e}", hint=hint)
    if isinstance(e, ssl.SSLCertVerificationError):
        return ConfigError(f"{what}: {host} is not trusted: {e.verify_message}", hint=hint)
    if not has_answered:
        hint = "correct endpoint_url: its scheme, host or port, or the region"
        if why in _NO_TLS:
            return ConfigError(f"{what}: {host} does not speak TLS", hint=hint)
        if isinstance(e, socket.gaierror) and e.errno == socket.EAI_NONAME:
            return ConfigError(f"{what}: no host is called {host}", hint=hint)
        if isinstance(e, ConnectionRefusedError):
            hint = "check that the server runs, and endpoint_url"
            return Transient(f"{what}: {host} refuses connections", hint=hint)
    hint = "the network or the server failed"
    if isinstance(e, TimeoutError):
        return Transient(f"{what}: {host} was silent for too long", hint=hint)
    reason = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
    kind = "ended early" if isinstance(e, http.client.HTTPException) else "broke"
    return Transient(f"{what}: the connection to {host} {kind}: {reason.lower()}", hint=hint)
