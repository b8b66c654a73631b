"""Signatures as botocore makes them."""

from __future__ import annotations

import hashlib
from datetime import datetime, timezone
from urllib.parse import urlsplit

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.stores.s3.signing import UNSIGNED, Keys, Signable, encoded, query_string, signed

WHEN = 1795257755.0
EMPTY = hashlib.sha256(b"").hexdigest()
WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=20)


def botocores(request: Signable, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> str:
    at = datetime.fromtimestamp(WHEN, timezone.utc).replace(tzinfo=None)
    monkeypatch.setattr("botocore.auth.get_current_datetime", lambda **_: at)
    url = f"https://{request.host}{request.path}?{query_string(request.query)}"
    theirs = AWSRequest(request.method, url, {**request.headers})
    S3SigV4Auth(Credentials(keys.access, keys.secret, keys.token or None), "s3", "eu-west-1").add_auth(theirs)
    return str(theirs.headers["Authorization"])


@given(key=WORDS, query=st.dictionaries(WORDS, WORDS, max_size=3), token=st.sampled_from(["", "t0ken/+="]))
def test_a_signature_is_the_one_that_botocore_makes(key: str, query: dict[str, str], token: str) -> None:
    keys = Keys("AKID", "secret/with+signs", token)
    request = Signable(
        "PUT", "b.s3.example:9000", f"/b/{encoded(key)}", tuple(query.items()), {"x-amz-meta-a": "two  spaces "}, EMPTY
    )
    with pytest.MonkeyPatch.context() as patch:
        theirs = botocores(request, keys, patch)
    assert signed(request, keys, "eu-west-1", WHEN)["Authorization"] == theirs


def test_what_is_signed_is_what_is_sent() -> None:
    path = encoded("a b/ünd~(x)/日本")
    assert path == "a%20b/%C3%BCnd~%28x%29/%E6%97%A5%E6%9C%AC"
    assert query_string([("b", "x y&"), ("a", "")]) == "a=&b=x%20y%26"
    assert urlsplit(f"http://h/{path}").path == f"/{path}"


def test_nobody_is_known_without_keys_and_no_key_is_printed() -> None:
    request = Signable("GET", "h", "/", (), {}, UNSIGNED)
    assert signed(request, None, "r", WHEN) == {"Host": "h"}
    assert repr(Keys("AKID", "secret", "token")) == "Keys()"
