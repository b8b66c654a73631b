from __future__ import annotations

import pytest

from ckptsync.errors import Transient
from ckptsync.stores.s3.xml import Begun, Fault, Object, Stored, completion, fault, objects, parts, seconds, text, tree, uploads

NS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


def test_a_listing_is_read_with_its_encoding() -> None:
    page = f"""<?xml version="1.0"?><ListBucketResult {NS}><EncodingType>url</EncodingType><IsTruncated>true</IsTruncated>
      <Contents><Key>a+b/%C3%BC%2B</Key><Size>7</Size><LastModified>2026-11-21T10:48:36.123Z</LastModified></Contents></ListBucketResult>"""
    root = tree(page.encode(), "s3://b")
    assert list(objects(root, "s3://b")) == [Object("a b/ü+", 7, 1795258116.0)]
    assert text(root, "IsTruncated") == "true"
    assert text(root, "Nothing") == ""


def test_a_size_that_is_no_number_is_no_answer_of_s3() -> None:
    with pytest.raises(Transient, match="Size is 'many'"):
        list(objects(tree(b"<R><Contents><Key>k</Key><Size>many</Size></Contents></R>", ""), "s3://b"))


def test_uploads_and_parts_are_read() -> None:
    page = "<R><Upload><Key>k+</Key><UploadId>u</UploadId><Initiated>2026-11-21T10:48:36Z</Initiated><ChecksumAlgorithm>CRC32</ChecksumAlgorithm></Upload></R>"
    assert list(uploads(tree(page.encode(), ""), "")) == [Begun("k+", "u", 1795258116.0, "CRC32", "")]
    page = "<R><Part><PartNumber>2</PartNumber><Size>5</Size><ETag>&quot;e&quot;</ETag><ChecksumCRC32>AAAAAA==</ChecksumCRC32></Part></R>"
    assert list(parts(tree(page.encode(), ""), "")) == [Stored(2, 5, '"e"', 0.0, "AAAAAA==")]


def test_a_completion_is_read_as_it_was_meant() -> None:
    root = tree(completion([(1, '"a&b"'), (2, '"c"')]), "")
    assert [(text(p, "PartNumber"), text(p, "ETag")) for p in root.iterfind("Part")] == [("1", '"a&b"'), ("2", '"c"')]


@pytest.mark.parametrize("body", [b"", b"<html>", b"not xml", b"<!DOCTYPE x [<!ENTITY a 'b'>]><Error><Code>&a;</Code></Error>"])
def test_what_is_no_answer_of_s3_says_nothing_as_an_error_and_is_transient_as_a_listing(body: bytes) -> None:
    assert fault(body) == Fault()
    with pytest.raises(Transient, match="s3://b: the server's answer is"):
        tree(body, "s3://b")


def test_an_error_says_where_the_bucket_is() -> None:
    assert fault(b"\n  <Error><Code>X</Code><Message>m</Message><Region>eu-west-1</Region></Error>") == Fault("X", "m", "eu-west-1")
    assert fault(b"<Completed/>") == Fault()
    assert seconds("", "s3://b") == 0
