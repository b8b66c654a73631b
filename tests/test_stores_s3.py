"""The S3 store against SeaweedFS."""

from __future__ import annotations

import pytest

from ckptsync.stores.contract import Store
from ckptsync.stores.s3 import S3Store
from ckptsync.stores.urls import Remote
from tests.store_contract import StoreContract
from tests.weed import weed


@pytest.fixture
def place() -> Remote:
    return Remote("s3", f"{weed().bucket()}/a prefix/ünd mehr")


@pytest.fixture
def store(place: Remote) -> Store:
    return S3Store(place, weed().options())


@pytest.fixture
def again(place: Remote) -> Store:
    return S3Store(place, weed().options())


class TestS3(StoreContract):
    pass
