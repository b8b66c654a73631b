"""A page of ListObjectsV2: what it lists, and the rest of it.

Where every object is written as the first one is, and nothing in the page could mislead a pattern, one made of the first takes them out: a tree of ten thousand
names costs more than all else that a catalogue does with them.  Any other page goes through `xml.objects`, and says the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from ckptsync.stores.s3.xml import Object, objects, seconds, size, text, tree, unescaped

_ROOT = "ListBucketResult"
_FIRST = re.compile(rb"<Contents>.*?</Contents>", re.DOTALL)
_TAG = re.compile(rb"<[^>]*>")
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
    first = _FIRST.search(body)
    if first is None or not body.isascii() or _MISLEADING.search(body):
        return None
    tags = _TAG.findall(first[0])
    if any(tags.count(tag) != 1 for tag in _WANTED):
        return None
    pattern = re.compile(b"".join(re.escape(tag) + _text_of(tag) for tag in tags))
    tree(first[0], what)  # so each that matches is as sound
    rest = tree(pattern.sub(b"", body), what, _ROOT)
    rows = [match.group("key", "size", "mtime") for match in pattern.finditer(body)]
    if rest.find("Contents") is not None or any(b"&" in key for key, _, _ in rows):
        return None
    encoding = text(rest, "EncodingType")
    return Page(rest, [Object(unescaped(k.decode(), encoding), size(s.decode(), what), seconds(m.decode())) for k, s, m in rows])


def _text_of(tag: bytes) -> bytes:
    """What may follow a tag."""
    return b"(?P<%s>[^<]*)" % _WANTED[tag] if tag in _WANTED else b"[^<]*"
