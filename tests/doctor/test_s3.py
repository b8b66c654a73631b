"""`ckptsync doctor` with keys of a real server's users: those that configs/ gives are enough, and
what a user may not is named.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptsync.doctor.store_checks import Checked, StoreTarget, check_store
from ckptsync.stores.limits import Limits
from tests.support.s3_permissions import policy
from tests.support.seaweedfs import weed


@pytest.fixture(scope="module")
def bucket() -> str:
    return weed().bucket()


def asked(bucket: str, options: dict[str, Any], *, deletes: bool = False) -> Checked:
    return check_store(StoreTarget(f"s3://{bucket}/store", options, Limits(), deletes), "n0", [])


def found(answer: Checked) -> list[tuple[str, int]]:
    return [(finding.kind, finding.exit_code) for finding in answer.findings]


@pytest.mark.parametrize("role", ["worker", "head"])
def test_what_configs_give_a_role_is_enough(bucket: str, role: str) -> None:
    answer = asked(bucket, weed().identity(*policy(f"policy-{role}", bucket, "store")))
    assert found(answer) == []
    assert answer.store is not None
    assert sorted(entry.name for entry in answer.store.names("")) == [
        ".ckptsync/clocks/n0~doctor",
        ".ckptsync/doctor/n0",
    ]


def test_a_head_that_lets_go_needs_to_delete(bucket: str) -> None:
    head = policy("policy-head", bucket, "store")
    assert found(asked(bucket, weed().identity(*head), deletes=True)) == [("store-delete", 4)]
    assert (
        found(
            asked(
                bucket, weed().identity(*head, *policy("policy-gc", bucket, "store")), deletes=True
            )
        )
        == []
    )


def test_a_wrong_key_or_bucket_is_found_and_no_key_is_told(bucket: str) -> None:
    wrong = weed().options("AKIAWRONG", "s3cret-s3cret")
    (one,) = asked(bucket, wrong).findings
    assert one.exit_code == 4
    assert "s3cret" not in json.dumps([one.what, one.hint, one.subject])
    assert found(asked("no-such-bucket", weed().options()))[0][1] == 4
