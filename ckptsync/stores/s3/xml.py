"""S3's answers in XML, as far as a store needs them.

Elements are looked for by their local names: servers differ in namespaces.  Source: docs.aws.amazon.com/AmazonS3/latest/API.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.etree.ElementTree import Element, ParseError, TreeBuilder, XMLParser
from xml.sax.saxutils import escape

from ckptsync.errors import Transient

_XMLNS = re.compile(rb'(<\w+)\s+xmlns="[^"<]*"')
"""The namespace of a whole document: without it elements have their local names at once."""
_PIECE = 64 << 10  # bytes parsed at once: a document type is refused before what follows it is looked at
_ELEMENTS = 200_000  # of a document, at most: a page of 1,000 objects has about 10,000
NAMES = 10_000_000  # that a listing has, at most
PARTS = 10_000  # that an upload has, at most: S3's own limit
IDLE = 1000  # pages of a listing that bring nothing new, one after the other, at most


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
    """A multipart upload that is not completed.  ``since``: seconds of the server's clock, infinity if untold: then it is never old.

    ``algorithm`` and ``kind`` of its checksums may be untold.
    """

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
    plain = _XMLNS.sub(rb"\1", body.lstrip(), count=1)
    parser = XMLParser(target=_Builder())  # noqa: S314  without a document type there are no entities to be expanded
    try:
        for start in range(0, len(plain), _PIECE):
            parser.feed(plain[start : start + _PIECE])
        root: Element = parser.close()
    except (ParseError, LookupError, ValueError) as e:  # the latter two: an encoding that Python does not know, or cannot stream
        raise _no_xml(what, str(e)) from e
    if b"xmlns" in plain:
        for each in root.iter():
            each.tag = each.tag.rpartition("}")[2]
    if wanted and root.tag != wanted:
        raise _no_xml(what, f"{wanted} wanted, {root.tag[:40]} got")
    return root


class _Builder(TreeBuilder):
    """Refuses, by ValueError, what S3 never sends."""

    _count = 0

    def doctype(self, *_: object) -> None:
        """Entities are declared in it."""
        raise ValueError("it has a document type")

    def start(self, tag: str, attrs: dict[str, str], /) -> Element:
        """The body is limited; what is made of it would be fifty times as large."""
        self._count += 1
        if self._count > _ELEMENTS:
            raise ValueError(f"more than {_ELEMENTS} elements")
        return super().start(tag, attrs)


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
    return Fault(text(root, "Code")[:100], text(root, "Message"), text(root, "Region"))


def text(element: Element, name: str) -> str:
    """Of the child of that name, or nothing."""
    found = element.find(name)
    return (found.text or "") if found is not None else ""


def objects(root: Element, what: str) -> Iterator[Object]:
    """Of ListObjectsV2; raises Transient."""
    encoding = text(root, "EncodingType")
    for each in root.iterfind("Contents"):
        told = {child.tag: child.text or "" for child in each}
        size = number(told.get("Size") or "0", "Size", what)
        yield Object(unescaped(told.get("Key", ""), encoding), size, seconds(told.get("LastModified", ""), what))


def unescaped(key: str, encoding: str) -> str:
    """A key as it is; ``encoding`` as the answer says (they are asked for URL-encoded, since XML cannot hold every character; not every server does it)."""
    return unquote_plus(key) if encoding == "url" and ("%" in key or "+" in key) else key


def number(told: str, name: str, what: str) -> int:
    """Raises Transient for what is none that S3 could say."""
    if not re.fullmatch("[0-9]{1,19}", told):
        raise _no_xml(what, f"{name} is {told[:40]!r}")
    return int(told)


def directories(root: Element) -> Iterator[str]:
    """Of ListObjectsV2 that was asked with a delimiter: keys up to it, and with it."""
    for each in root.iterfind("CommonPrefixes"):
        yield unescaped(text(each, "Prefix"), text(root, "EncodingType"))


def uploads(root: Element, what: str) -> Iterator[Begun]:
    """Of ListMultipartUploads; raises Transient."""
    for each in root.iterfind("Upload"):
        key = unescaped(text(each, "Key"), text(root, "EncodingType"))
        since = seconds(text(each, "Initiated"), what) or math.inf
        yield Begun(key, upload_id(each, what), since, text(each, "ChecksumAlgorithm"), text(each, "ChecksumType"))


def upload_id(element: Element, what: str) -> str:
    """Raises Transient if there is none: a request without it would mean another thing."""
    found = text(element, "UploadId")
    if not found:
        raise _no_xml(what, "UploadId is missing")
    return found


def parts(root: Element, what: str) -> Iterator[Stored]:
    """Of ListParts; raises Transient."""
    for each in root.iterfind("Part"):
        at = number(text(each, "PartNumber"), "PartNumber", what)
        size, mtime = number(text(each, "Size"), "Size", what), seconds(text(each, "LastModified"), what)
        yield Stored(at, size, text(each, "ETag"), mtime, text(each, "ChecksumCRC32"))


class Paging:
    """Follows one listing from page to page, and sees that it ends.

    ``markers``: the elements that say where the next page begins, and the parameters that ask for it; ``most``: names that the listing may have, if not `NAMES`.
    """

    def __init__(self, what: str, markers: Mapping[str, str], most: int = 0) -> None:
        self._what, self._markers, self._most = what, markers, most or NAMES
        self._places: set[tuple[str, ...]] = set()
        self._lasts: set[str] = set()
        self._count = self._idle = 0

    def following(self, root: Element, count: int, last: str) -> dict[str, str]:
        """The parameters that ask for the next page; none after the last one.  ``count``: names on this page; ``last`` of them.

        Raises Transient where a page follows and cannot be asked for, or the listing does not end: what is not seen must not be taken to be absent.
        """
        if text(root, "IsTruncated") != "true":
            return {}
        place = tuple(text(root, marker) for marker in self._markers)
        if not place[0] or place in self._places:
            raise _no_xml(self._what, "its listing goes on, and does not say where, or says the same place again")
        self._count, self._idle = self._count + count, 0 if count and last not in self._lasts else self._idle + 1
        if self._count > self._most or self._idle > IDLE:
            raise _no_xml(self._what, f"its listing does not end: {self._count} names, {self._idle} pages that bring nothing new")
        self._places.add(place)
        self._lasts.add(last)
        return dict(zip(self._markers.values(), place, strict=True))


def completion(parts: Iterable[tuple[int, str]]) -> bytes:
    """The body of CompleteMultipartUpload: number and tag of each part."""
    lines = [f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(tag)}</ETag></Part>" for number, tag in parts]
    inner = "".join(lines)
    return f'<CompleteMultipartUpload xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}</CompleteMultipartUpload>'.encode()


def seconds(moment: str, what: str) -> float:
    """Since 1970, in whole seconds (servers differ in the digits of fractions); 0 if nothing is said; raises Transient for what is no time."""
    try:
        return _seconds(moment[:19])
    except ValueError as e:
        raise _no_xml(what, f"a time is {moment[:40]!r}") from e


@lru_cache(1024)  # many files are of the same second
def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment + "+00:00").timestamp() if moment else 0.0
