"""What S3 asks of a caller's permissions, request by request, and whether the policies of configs/
give it.

Which permission an operation needs:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/using-with-s3-policy-actions.html.  Which keys
of conditions a request has:
https://docs.aws.amazon.com/service-authorization/latest/reference/list_amazons3.html; those of
conditional writes:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.support.fault_proxy import HttpProxy, _header, kind_of

CONFIGS = Path(__file__).parent.parent.parent / "configs"
KEY = "arn:aws:kms:REGION:ACCOUNT:key/KEY"
Statement = Mapping[str, Any]

# operation → permission on the object, on the bucket; what the key of an encrypted bucket is asked
# for
_OBJECT = {
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "CompleteMultipartUpload": "s3:PutObject",
    "CreateMultipartUpload": "s3:PutObject",
    "DeleteObject": "s3:DeleteObject",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "ListParts": "s3:ListMultipartUploadParts",
    "PutObject": "s3:PutObject",
    "UploadPart": "s3:PutObject",
}
_BUCKET = {
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "ListObjectsV2": "s3:ListBucket",
}
_KMS = {
    "CreateMultipartUpload": "kms:GenerateDataKey",
    "GetObject": "kms:Decrypt",
    "PutObject": "kms:GenerateDataKey",
    "UploadPart": "kms:Decrypt",
}


@dataclass(frozen=True)
class Asked:
    """A permission that a request needs.  ``facts`` are the keys that conditions may ask for."""

    action: str
    resource: str
    facts: Mapping[str, str] = field(default_factory=dict, hash=False)


class Recorder(HttpProxy):
    """Passes requests on, and remembers the permissions that each of them needs."""

    def __init__(self, upstream: tuple[str, int]) -> None:
        self.asked: list[Asked] = []
        super().__init__(upstream)

    def _exchange(
        self,
        client: socket.socket,
        server: socket.socket,
        requests: BinaryIO,
        responses: BinaryIO,
        head: list[bytes],
    ) -> None:
        self.asked += needed(head)
        super()._exchange(client, server, requests, responses, head)


def needed(head: list[bytes]) -> Iterator[Asked]:
    """Yield the permissions for a request (path style), in a bucket encrypted with its own key."""
    method, target, _ = head[0].decode("latin-1").split(" ", 2)
    kind = kind_of(method, target)
    query = dict(parse_qsl(urlsplit(target).query, keep_blank_values=True))
    bucket, _, key = unquote(urlsplit(target).path).lstrip("/").partition("/")
    facts = {"aws:SecureTransport": "true"}
    if kind in _OBJECT:
        if match := _header(head, b"if-none-match"):
            facts["s3:if-none-match"] = match.decode()
        if _OBJECT[kind] == "s3:PutObject":
            creates = kind in ("PutObject", "CompleteMultipartUpload")
            facts["s3:ObjectCreationOperation"] = str(creates).lower()
        yield Asked(_OBJECT[kind], f"arn:aws:s3:::{bucket}/{key}", facts)
    elif kind in _BUCKET:
        if kind == "ListObjectsV2" and "prefix" in query:
            facts["s3:prefix"] = query["prefix"]
        yield Asked(_BUCKET[kind], f"arn:aws:s3:::{bucket}", facts)
    else:
        yield Asked(f"s3:{kind}", f"arn:aws:s3:::{bucket}")  # none that a policy of ours names
    if kind in _KMS:
        yield Asked(_KMS[kind], KEY, {"kms:ViaService": "s3.eu-west-1.amazonaws.com"})


def policy(name: str, bucket: str = "BUCKET", prefix: str = "PREFIX") -> list[Statement]:
    """Return the statements of ``configs/s3-<name>.json`` for a bucket and a prefix."""
    text = (CONFIGS / f"s3-{name}.json").read_text()
    statements: list[Statement] = json.loads(
        text.replace("BUCKET", bucket).replace("PREFIX", prefix)
    )["Statement"]
    return statements


def is_allowed(asked: Asked, statements: Iterable[Statement]) -> bool:
    """Return whether some statement allows it, and none denies it."""
    effects = {str(s["Effect"]) for s in statements if _speaks_of(s, asked)}
    return effects == {"Allow"}


def refused(asked: Iterable[Asked], statements: list[Statement]) -> list[Asked]:
    """Return those that are not allowed."""
    return [permission for permission in asked if not is_allowed(permission, statements)]


def without(action: str, statements: Iterable[Statement]) -> list[Statement]:
    """Return the statements, with one action taken out of those that allow."""
    return [
        {**s, "Action": [a for a in _list(s["Action"]) if a != action]}
        if s["Effect"] == "Allow"
        else s
        for s in statements
    ]


def actions(statements: Iterable[Statement]) -> set[str]:
    """Return all actions that some statement allows."""
    return {action for s in statements if s["Effect"] == "Allow" for action in _list(s["Action"])}


def _speaks_of(statement: Statement, asked: Asked) -> bool:
    return (
        any(_matches(pattern, asked.action) for pattern in _list(statement["Action"]))
        and any(_matches(pattern, asked.resource) for pattern in _list(statement["Resource"]))
        and all(
            _holds(operator, key, _list(values), asked.facts)
            for operator, keys in statement.get("Condition", {}).items()
            for key, values in keys.items()
        )
    )


def _holds(operator: str, key: str, values: list[str], facts: Mapping[str, str]) -> bool:
    """Return whether a condition holds; without its key in a request only `Null` can."""
    if operator == "Null":
        return str(key not in facts).lower() in values
    if operator == "StringLike":
        return key in facts and any(_matches(value, facts[key]) for value in values)
    if operator == "Bool":
        return facts.get(key) in values
    raise NotImplementedError(operator)


def _matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches: ``*`` is any characters, slashes too, ``?`` one."""
    expression = "".join({"*": ".*", "?": "."}.get(c, re.escape(c)) for c in pattern)
    return re.fullmatch(expression, text, re.DOTALL) is not None


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
