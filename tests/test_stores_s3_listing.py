"""A page says the same whether it is taken apart by a pattern or through a tree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.errors import Transient
from ckptsync.stores.s3 import listing
from ckptsync.stores.s3.listing import page
from ckptsync.stores.s3.xml import Object, directories, objects, text, tree

NS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
WEED = "<Contents><Key>{}</Key><ETag>&#34;e&#34;</ETag><Size>{}</Size><StorageClass>STANDARD</StorageClass><LastModified>2026-11-21T10:48:36Z</LastModified></Contents>"
AWS = "<Contents><Key>{}</Key><LastModified>2026-11-21T10:48:36.000Z</LastModified><ETag>&quot;e&quot;</ETag><ChecksumType>FULL_OBJECT</ChecksumType><Size>{}</Size></Contents>"
OWNED = "\n  <Contents>\n <Key>{}</Key> <Owner><ID>me</ID></Owner><LastModified>2026-11-21T10:48:36Z</LastModified><ETag></ETag><Size>{}</Size></Contents>"
MTIME = 1795258116.0


def body(
    rows: str, more: str = "<IsTruncated>true</IsTruncated>", declared: str = '<?xml version="1.0" encoding="UTF-8"?>'
) -> bytes:
    return f"{declared}\n<ListBucketResult {NS}><Name>b</Name>{more}{rows}<NextContinuationToken>t</NextContinuationToken></ListBucketResult>".encode()


def by_tree(given: bytes) -> list[Object]:
    return list(objects(tree(given, ""), ""))


@pytest.fixture
def no_tree_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes through a tree after all fails."""
    monkeypatch.delattr(listing, "objects")


@pytest.mark.usefixtures("no_tree_of_objects")
@pytest.mark.parametrize("row", [WEED, AWS, OWNED])
def test_rows_that_are_written_alike_need_no_tree(row: str) -> None:
    found = page(body(row.format("a/b", 7) + row.format("a/c%20+d", 0), "<EncodingType>url</EncodingType>"), "s3://b")
    assert found.objects == [Object("a/b", 7, MTIME), Object("a/c  d", 0, MTIME)]
    assert text(found.rest, "NextContinuationToken") == "t"


def test_a_page_of_directories_has_them() -> None:
    found = page(body("<CommonPrefixes><Prefix>a/</Prefix></CommonPrefixes>"), "s3://b")
    assert (list(directories(found.rest)), list(found.objects)) == (["a/"], [])


def test_directories_between_objects_are_not_lost() -> None:
    found = page(body(WEED.format("a", 1) + "<CommonPrefixes><Prefix>b/</Prefix></CommonPrefixes>" + WEED.format("c", 1)), "s3://b")
    assert (list(directories(found.rest)), [o.key for o in found.objects]) == (["b/"], ["a", "c"])


@pytest.mark.parametrize(
    "rows",
    [
        WEED.format("a", 1) + AWS.format("b", 2),
        WEED.format("a&amp;b", 1) + WEED.format("c", 1),
        WEED.format("<![CDATA[a<b]]>", 1),
        WEED.format("a", 1) + "<!-- " + WEED.format("b", 1) + " -->",
        WEED.format("ü", 1),
        WEED.format("a", 1) + WEED.format("b", 1).replace("<Size>", '<Size unit="B">'),
        "<Contents><Key>a</Key></Contents>" + WEED.format("b", 1),
        WEED.format("a\r\nb", 1),
        WEED.format("a", 1) + "<?note " + WEED.format("b", 1) + "?>",
        WEED.format("a", 1).replace("<Key>", "<Key >"),
    ],
)
def test_what_a_pattern_could_misread_says_what_its_tree_says(rows: str) -> None:
    assert list(page(body(rows), "s3://b").objects) == by_tree(body(rows))


keys = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), min_size=1, max_size=8)
paged = st.builds(lambda row, key, size: row.format(key.replace("&", "&amp;").replace("<", "&lt;"), size), st.sampled_from((WEED, AWS, OWNED)), keys, st.integers(0, 1 << 50))  # fmt: skip


@given(st.lists(paged, max_size=6), st.sampled_from(("", "<EncodingType>url</EncodingType>")))
def test_any_page_says_what_its_tree_says(rows: list[str], more: str) -> None:
    given = body("".join(rows), more)
    assert list(page(given, "").objects) == by_tree(given)


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"<html>",
        body(WEED.format("a", 1))[:-9],
        body(WEED.format("a", 1).replace("</Key>", "")),
        body(WEED.format("a", "many")),
        body(WEED.format("a", 1), declared="<!DOCTYPE x [<!ENTITY a 'b'>]>"),
        body(WEED.format("a", 1)).replace(b"ListBucketResult", b"Error"),
    ],
)
def test_what_is_no_page_is_transient(bad: bytes) -> None:
    with pytest.raises(Transient, match="s3://b: the server's answer is not S3's"):
        page(bad, "s3://b")
