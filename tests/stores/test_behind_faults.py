"""What every store promises, on SeaweedFS and OpenSSH behind proxies that cut, stall, truncate,
answer errors and lose responses.

``CKPTSYNC_FAULT_SEED=7`` draws other faults.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.stores.contract import Store
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import bare
from ckptsync.stores.s3.store import S3Store
from tests.support.fault_proxy import HttpProxy, TcpProxy
from tests.support.network_faults import (
    CUT,
    DOWN,
    END,
    HEADLESS,
    STALL,
    TRICKLE,
    UP,
    Answer,
    Break,
    Fault,
    Plan,
    Request,
    often,
)
from tests.support.seaweedfs import weed
from tests.support.sshd import sshd
from tests.support.store_contract import StoreContract

SEED = os.environ.get("CKPTSYNC_FAULT_SEED", "1")
LIMITS = Limits(threads=2, patience=30, stall=1.5)
ANY_REQUEST: list[Fault] = [
    Break(UP, CUT, HEADLESS),
    Break(UP, CUT, 10_000),
    Break(UP, STALL, 10_000),
    Break(DOWN, CUT, HEADLESS),
    Break(DOWN, CUT, 0),
    Break(DOWN, END, HEADLESS),
    Break(DOWN, END, 100),
    Break(DOWN, STALL, 3),
    Break(DOWN, TRICKLE, 5_000),
    Answer(500, "InternalError"),
    Answer(500, "InternalError", is_done=True),
    Answer(503, "SlowDown"),
]
IN_A_CONNECTION: list[Fault] = [
    *(
        Break(side, CUT, after)
        for side in (UP, DOWN)
        for after in (0, 2_000, 5_000, 6_000, 8_000, 100_000, 10 << 20)
    ),
    *(Break(side, STALL, after) for side in (UP, DOWN) for after in (6_000, 100_000)),
    Break(DOWN, END, 6_000),
]
IN_200 = [Answer(200, "InternalError"), Answer(200, "InternalError", is_done=True)]


def seed_of(request: pytest.FixtureRequest) -> int:
    """Another one for each test."""
    return zlib.crc32(f"{SEED} {request.node.name}".encode())


def as_s3_fails(seed: int) -> Plan:
    """An error in an answer of 200 is what CompleteMultipartUpload may give, and nothing else
    here.
    """
    plain, completing = often(seed, 0.2, ANY_REQUEST), often(seed, 0.5, [*ANY_REQUEST, *IN_200])

    def plan(request: Request) -> Fault | None:
        return (completing if request.kind == "CompleteMultipartUpload" else plain)(request)

    return plan


class TestS3BehindFaults(StoreContract):
    @pytest.fixture
    def url(self) -> str:
        return f"s3://{weed().bucket()}/some/where"

    @pytest.fixture
    def proxy(self, request: pytest.FixtureRequest) -> Iterator[HttpProxy]:
        with closing(HttpProxy(("127.0.0.1", weed().port), as_s3_fails(seed_of(request)))) as proxy:
            yield proxy

    @pytest.fixture
    def store(self, url: str, proxy: HttpProxy) -> Store:
        return self.opened(url, proxy)

    @pytest.fixture
    def again(self, url: str, proxy: HttpProxy) -> Store:
        return self.opened(url, proxy)

    def opened(self, url: str, proxy: HttpProxy) -> Store:
        store = bare(url, weed().options(endpoint=f"http://127.0.0.1:{proxy.port}"), LIMITS)
        assert isinstance(store, S3Store)
        store.least = 5 << 20  # more requests to fail
        return store


class TestSftpBehindFaults(StoreContract):
    @pytest.fixture
    def proxy(self, request: pytest.FixtureRequest) -> Iterator[TcpProxy]:
        with closing(
            TcpProxy(("127.0.0.1", sshd().port), often(seed_of(request), 0.5, IN_A_CONNECTION))
        ) as proxy:
            yield proxy

    @pytest.fixture
    def store(self, tmp_path: Path, proxy: TcpProxy) -> Store:
        return self.opened(tmp_path, proxy)

    @pytest.fixture
    def again(self, tmp_path: Path, proxy: TcpProxy) -> Store:
        return self.opened(tmp_path, proxy)

    def opened(self, tmp_path: Path, proxy: TcpProxy) -> Store:
        root, known = tmp_path / "root", tmp_path / "known_hosts"
        root.mkdir(exist_ok=True)
        known.write_text(
            sshd().known_hosts.read_text().replace(f":{sshd().port} ", f":{proxy.port} ")
        )
        url = f"sftp://{sshd().user}@127.0.0.1:{proxy.port}{root}"
        return bare(url, {**sshd().options, "known_hosts": str(known)}, replace(LIMITS, stall=3.0))
