"""Signature version 4 of a request to S3.

Source: docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html.  S3 encodes a path once, and does not normalise it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import lru_cache
from urllib.parse import quote

UNSIGNED = "UNSIGNED-PAYLOAD"
_ALGORITHM = "AWS4-HMAC-SHA256"


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials as they are at one moment; nothing of them is printed."""

    access: str = field(repr=False)
    secret: str = field(repr=False)
    token: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True)
class Signable:
    """What is signed.  ``path`` is encoded already (`encoded`), ``query`` is not; ``payload`` is the body's SHA-256 in hex, or `UNSIGNED`."""

    method: str
    host: str
    path: str
    query: Sequence[tuple[str, str]]
    headers: Mapping[str, str]
    payload: str


def encoded(text: str) -> str:
    """A path as it goes over the wire and into the signature."""
    return quote(text, safe="/~")


def query_string(query: Sequence[tuple[str, str]]) -> str:
    """In the order and the encoding that are signed."""
    pairs = sorted((quote(k, safe="~"), quote(v, safe="~")) for k, v in query)  # as they are encoded: "[" comes before "0"
    return "&".join(f"{k}={v}" for k, v in pairs)


def signed(request: Signable, keys: Keys | None, region: str, when: float) -> dict[str, str]:
    """The headers to send: those of the request, and those that prove who sends it; ``keys`` are None where nobody needs to be known."""
    headers = {**request.headers, "Host": request.host}
    if keys is None:
        return headers
    stamp = _stamp(int(when))
    headers |= {"X-Amz-Date": stamp, "X-Amz-Content-SHA256": request.payload}
    if keys.token:
        headers["X-Amz-Security-Token"] = keys.token
    names, canonical = _canonical(request, headers)
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    to_sign = "\n".join([_ALGORITHM, stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    signature = hmac.new(_key(keys.secret, stamp[:8], region), to_sign.encode(), hashlib.sha256).hexdigest()
    headers["Authorization"] = f"{_ALGORITHM} Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return headers


def _canonical(request: Signable, headers: Mapping[str, str]) -> tuple[str, str]:
    """The names of the signed headers, and the text whose digest is signed."""
    chosen = sorted((name, " ".join(v.split())) for k, v in headers.items() if _is_signed(name := k.lower()))
    names = ";".join(name for name, _ in chosen)
    lines = [f"{name}:{value}" for name, value in chosen]
    return names, "\n".join([request.method, request.path, query_string(request.query), *lines, "", names, request.payload])


def _is_signed(name: str) -> bool:
    return name.startswith("x-amz-") or name in ("host", "content-md5", "content-type", "range", "if-match", "if-none-match")


@lru_cache(2)
def _stamp(when: int) -> str:
    return datetime.fromtimestamp(when, timezone.utc).strftime("%Y%m%dT%H%M%SZ")


@lru_cache(8)
def _key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for word in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    return key
