from __future__ import annotations

from pathlib import Path

import pytest

from ckptsync.stores.contract import Store
from ckptsync.stores.sftp import SftpStore
from ckptsync.stores.urls import Remote
from tests.sshd import sshd
from tests.store_contract import StoreContract


def sftp(path: Path) -> SftpStore:
    server = sshd()
    return SftpStore(Remote("sftp", server.url(path).partition("://")[2]), server.options)


class TestSftp(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return sftp(tmp_path)

    @pytest.fixture
    def again(self, tmp_path: Path) -> Store:
        return sftp(tmp_path)
