"""Multipart uploads that nobody has completed: finding those of a key again, and removing those that were given up."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from ckptsync.errors import NotFound, StoreError, Transient
from ckptsync.records.names import STORE_FILE
from ckptsync.stores.parts import Part
from ckptsync.stores.s3.bucket import Ask
from ckptsync.stores.s3.errors import Gone
from ckptsync.stores.s3.put import Sender
from ckptsync.stores.s3.sums import crc_of, header, is_md5, md5_of, plain
from ckptsync.stores.s3.xml import PARTS, Begun, Paging, Stored, parts, tree, uploads

HOUR = 3600.0
GIVEN_UP = 24 * HOUR  # without a new part: nobody is at work on it, and this name is being written anew
STALE = 7 * 24 * HOUR  # the same for names that nobody writes any more

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Orphan:
    """An upload and what it has.  ``idle``: seconds since something happened to it, by the server's clock."""

    begun: Begun
    stored: tuple[Stored, ...]
    idle: float

    def agrees(self, part: Part, most: int) -> bool | None:
        """Whether it has this part, these bytes; None if it has no part of this number, and nothing else speaks against it.

        ``most``: parts that the file has; with others beyond them it is another file's.
        """
        is_composite = (
            self.begun.algorithm == "CRC32" and self.begun.kind != "FULL_OBJECT"
        )  # whose completion needs what we do not keep
        if is_composite or any(each.number > most for each in self.stored):
            return False
        there = [each for each in self.stored if each.number == part.number]
        return any(is_same(each, part) for each in there) if there else None


def is_same(stored: Stored, part: Part) -> bool:
    """Whether the server has these bytes: by its checksum if it tells one, else by its tag, if that can be an MD5."""
    if stored.size != len(part.data):
        return False
    if stored.crc:
        return stored.crc == header(crc_of(part.data))
    return is_md5(stored.tag) and plain(stored.tag) == md5_of(part.data).hex()


def orphans(sender: Sender, key: str) -> list[Orphan]:
    """Those of one key; none, and a warning, if nobody may list them: then nothing is continued."""
    try:
        known = ("", "CRC32" if sender.takes_crc else "CRC64NVME")  # the latter is AWS's own, where none was asked for
        found = [begun for begun, _ in _begun(sender, key) if begun.key == key and begun.algorithm in known]
        return [orphan for begun in found if (orphan := _looked_at(sender, begun)) is not None]
    except Transient:
        raise
    except StoreError as e:
        log.warning("%s: unfinished uploads cannot be listed, so none is continued: %s", sender.bucket.url(key), e)
        return []


def remove(sender: Sender, key: str, upload: str) -> None:
    """Its parts, too.  Removing what is not there is no error."""
    try:
        sender.ask(Ask("AbortMultipartUpload", key, [("uploadId", upload)]))
    except (Gone, NotFound):
        return  # that was the aim


def sweep(sender: Sender, prefix: str) -> None:
    """Remove what was given up anywhere below ``prefix``, if that is one of our stores: then whatever is begun there is ours."""
    try:
        if sender.found(f"{prefix}{STORE_FILE}") is None:
            return
        for begun, now in _begun(sender, prefix):
            if now - begun.since > STALE and (orphan := _looked_at(sender, begun)) is not None and orphan.idle > STALE:
                log.info(
                    "%s: removing an upload that was given up %.0f days ago", sender.bucket.url(begun.key), orphan.idle / 24 / HOUR
                )
                remove(sender, begun.key, begun.id)
    except StoreError as e:
        log.warning(
            "%s: uploads that were given up cannot be removed: %s", sender.bucket.url(prefix), e
        )  # it costs money, and nothing else


def _begun(sender: Sender, prefix: str) -> Iterator[tuple[Begun, float]]:
    """Uploads of keys that start with ``prefix``, each with the server's time.  Page by page (API: ListMultipartUploads)."""
    query = {"uploads": "", "prefix": prefix, "encoding-type": "url"}
    what = sender.bucket.url(prefix)
    paging = Paging(what, {"NextKeyMarker": "key-marker", "NextUploadIdMarker": "upload-id-marker"})
    while True:
        ask = Ask("ListMultipartUploads", query=tuple(query.items()))
        root, now = sender.read(ask, lambda a: (tree(a.body, what, "ListMultipartUploadsResult"), sender.bucket.server_time(a)))
        found = list(uploads(root, what))
        yield from ((begun, now) for begun in found)
        following = paging.following(root, len(found), found[-1].id if found else "")
        if not following:
            return
        query |= following


def _looked_at(sender: Sender, begun: Begun) -> Orphan | None:
    """With its parts, page by page (API: ListParts); None if it is gone meanwhile."""
    query = {"uploadId": begun.id}
    found: list[Stored] = []
    what = sender.bucket.url(begun.key)
    paging = Paging(what, {"NextPartNumberMarker": "part-number-marker"}, PARTS)
    while True:
        try:
            ask = Ask("ListParts", begun.key, tuple(query.items()))
            root, now = sender.read(ask, lambda a: (tree(a.body, what, "ListPartsResult"), sender.bucket.server_time(a)))
        except (Gone, NotFound):
            return None
        page = list(parts(root, what))
        found += page
        following = paging.following(root, len(page), str(page[-1].number) if page else "")
        if not following:
            last = max([begun.since, *(each.mtime for each in found)])
            return Orphan(begun, tuple(found), now - last)
        query |= following
