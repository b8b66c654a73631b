"""S3's answers in XML, as far as a store needs them.

Elements are looked for by their local names: servers differ in namespaces.  Source: docs.aws.amazon.com/AmazonS3/latest/API.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element, ParseError, fromstring
from xml.sax.saxutils import escape

from ckptsync.errors import StoreError, Transient

_XMLNS = re.compile(rb'(<\w+)\s+xmlns="[^"<]*"')
"""The namespace of a whole document: without it elements have their local names at once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What an <Error> says."""

    code: str = ""
    message: str = ""
    region: str = ""


class Object(NamedTuple):  # there are many
    """A listed object."""

    key: str
    size: int
    mtime: float


@dataclass(frozen=True, slots=True)
class Begun:
    """A multipart upload that is not completed.  ``since``: seconds of the server's clock.  ``algorithm`` and ``kind`` of its checksums may be untold."""

    key: str
    id: str
    since: float
    algorithm: str
    kind: str


@dataclass(frozen=True, slots=True)
class Stored:
    """A part of such an upload.  ``crc`` is base64, as in S3's headers, or empty."""

    number: int
    size: int
    tag: str
    mtime: float
    crc: str


def tree(body: bytes, what: str, wanted: str = "") -> Element:
    """The root element; raises Transient for what is no XML, is no ``wanted``, or might be an attack on the parser (a document type).

    A proxy's page is XML, too, sometimes; and of what is not there it says nothing.
    """
    if b"<!DOCTYPE" in body[:1024]:
        raise _no_xml(what, "it has a document type")
    try:
        plain = _XMLNS.sub(rb"\1", body, count=1)
        root = fromstring(plain)  # noqa: S314  without a document type there are no entities to be expanded
    except ParseError as e:
        raise _no_xml(what, str(e)) from e
    if b"xmlns" in plain:
        for each in root.iter():
            each.tag = each.tag.rpartition("}")[2]
    if wanted and root.tag != wanted:
        raise _no_xml(what, f"{wanted} wanted, {root.tag[:40]} got")
    return root


def _no_xml(what: str, why: str) -> Transient:
    return Transient(f"{what}: the server's answer is not S3's: {why}", hint="is this an S3 server? a proxy may have answered")


def fault(body: bytes) -> Fault:
    """Of an answer that may be an error; one without a code if it is none, or cannot be read."""
    try:
        root = tree(body, "")
    except Transient:
        return Fault()  # a proxy's page, or nothing: the status says all there is
    if root.tag != "Error":
        return Fault()
    return Fault(text(root, "Code"), text(root, "Message"), text(root, "Region"))


def text(element: Element, name: str) -> str:
    """Of the child of that name, or nothing."""
    found = element.find(name)
    return (found.text or "") if found is not None else ""


def objects(root: Element, what: str) -> Iterator[Object]:
    """Of ListObjectsV2; raises Transient."""
    encoding = text(root, "EncodingType")
    for each in root.iterfind("Contents"):
        told = {child.tag: child.text or "" for child in each}
        yield Object(
            unescaped(told.get("Key", ""), encoding), size(told.get("Size", ""), what), seconds(told.get("LastModified", ""))
        )


def unescaped(key: str, encoding: str) -> str:
    """A key as it is; ``encoding`` as the answer says (they are asked for URL-encoded, since XML cannot hold every character; not every server does it)."""
    return unquote_plus(key) if encoding == "url" and ("%" in key or "+" in key) else key


def size(told: str, what: str) -> int:
    """Bytes; raises Transient for what is no number."""
    if told and not told.isdecimal():
        raise _no_xml(what, f"a size of {told[:40]!r}")
    return int(told or 0)


def directories(root: Element) -> Iterator[str]:
    """Of ListObjectsV2 that was asked with a delimiter: keys up to it, and with it."""
    for each in root.iterfind("CommonPrefixes"):
        yield unescaped(text(each, "Prefix"), text(root, "EncodingType"))


def uploads(root: Element) -> Iterator[Begun]:
    """Of ListMultipartUploads."""
    for each in root.iterfind("Upload"):
        key, since = unescaped(text(each, "Key"), text(root, "EncodingType")), seconds(text(each, "Initiated"))
        yield Begun(key, text(each, "UploadId"), since, text(each, "ChecksumAlgorithm"), text(each, "ChecksumType"))


def parts(root: Element) -> Iterator[Stored]:
    """Of ListParts."""
    for each in root.iterfind("Part"):
        mtime = seconds(text(each, "LastModified"))
        yield Stored(int(text(each, "PartNumber")), int(text(each, "Size")), text(each, "ETag"), mtime, text(each, "ChecksumCRC32"))


def next_page(root: Element, marker: str, asked: str, what: str) -> str:
    """Where the next page begins, by the element ``marker``; nothing if there is none.  ``asked``: where this one did.

    Raises StoreError where a page follows and cannot be asked for: what is on it must not be taken to be absent.
    """
    if text(root, "IsTruncated") != "true":
        return ""
    found = text(root, marker)
    if not found or found == asked:
        raise StoreError(f"{what}: the server's listing goes on, and does not say where: {marker} is missing or the same again")
    return found


def completion(parts: Iterable[tuple[int, str]]) -> bytes:
    """The body of CompleteMultipartUpload: number and tag of each part."""
    lines = [f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>" for number, tag in parts]
    inner = "".join(lines)
    return f'<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</CompleteMultipartUpload>'.encode()


@lru_cache(1024)  # many files are of the same second
def seconds(moment: str) -> float:
    """Since 1970, in whole seconds (servers differ in the digits of fractions); 0 for what is no time."""
    try:
        return datetime.fromisoformat(moment[:19] + "+00:00").timestamp()
    except ValueError:
        return 0.0
