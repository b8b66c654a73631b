"""A page of ListObjectsV2: what it lists, and the rest of it.

Where every object is written as the first one is, and nothing in the page could mislead a pattern, one made of the first takes them out: a tree of ten thousand
names costs more than all else that a catalogue does with them.  Any other page goes through `xml.objects`, and says the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from ckptsync.stores.s3.xml import Object, number, objects, seconds, text, tree, unescaped

_ROOT = "ListBucketResult"
_ROW = (b"<Contents>", b"</Contents>")
_TAG = re.compile(rb"<[^<>]*>")
_TAGS = 64  # of a row that is taken for a pattern
_WANTED = {b"<Key>": b"key", b"<Size>": b"size", b"<LastModified>": b"mtime"}
_MISLEADING = re.compile(rb"<!|\r|.<\?", re.DOTALL)
"""Comments and marked sections; line ends that a parser changes; instructions, but for the declaration."""


@dataclass(frozen=True, slots=True)
class Page:
    """``rest``: its root, perhaps without the objects."""

    rest: Element
    objects: Sequence[Object]


def page(body: bytes, what: str) -> Page:
    """Raises Transient for what is no such page, as `xml.tree`."""
    found = _by_pattern(body, what)
    if found is None:
        root = tree(body, what, _ROOT)
        found = Page(root, list(objects(root, what)))
    return found


def _by_pattern(body: bytes, what: str) -> Page | None:
    start = body.find(_ROW[0])
    end = body.find(_ROW[1], start) + len(_ROW[1])
    if start < 0 or end < start or not body.isascii() or _MISLEADING.search(body):
        return None
    first = body[start:end]
    tags = _TAG.findall(first)
    if len(tags) > _TAGS or any(tags.count(tag) != 1 for tag in _WANTED):
        return None
    pattern = re.compile(b"".join(re.escape(tag) + _text_of(tag) for tag in tags))
    tree(first, what)  # so each that matches is as sound
    rest = tree(pattern.sub(b"", body), what, _ROOT)
    rows = [match.group("key", "size", "mtime") for match in pattern.finditer(body)]
    if rest.find("Contents") is not None or any(b"&" in key for key, _, _ in rows):
        return None
    encoding = text(rest, "EncodingType")
    return Page(rest, [_object(key.decode(), size.decode(), mtime.decode(), (encoding, what)) for key, size, mtime in rows])


def _object(key: str, size: str, mtime: str, page: tuple[str, str]) -> Object:
    encoding, what = page
    return Object(unescaped(key, encoding), number(size or "0", "Size", what), seconds(mtime, what))


def _text_of(tag: bytes) -> bytes:
    """What may follow a tag."""
    return b"(?P<%s>[^<]*)" % _WANTED[tag] if tag in _WANTED else b"[^<]*"
