"""Stores on SeaweedFS and OpenSSH behind proxies that cut, stall, truncate, answer errors and lose
responses: one fault at a time, at every request of an upload in parts and of each small operation.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.errors import Exists
from ckptsync.stores.contract import About, Store, read_all
from ckptsync.stores.limits import Limits
from ckptsync.stores.opening import open_any
from ckptsync.stores.s3.store import S3Store
from tests.support.exhaustive import sampled
from tests.support.fault_proxy import HttpProxy, TcpProxy
from tests.support.network_faults import (
    CUT,
    DOWN,
    END,
    HEADLESS,
    STALL,
    UP,
    Answer,
    Break,
    Fault,
    Plan,
    Request,
    harmless,
    once,
)
from tests.support.seaweedfs import weed
from tests.support.sftp_stores import through
from tests.support.sshd import sshd
from tests.support.store_contract import names

LIMITS = Limits(threads=2, patience=300, stall=1.0)
PART = 5 << 20  # the least that S3 takes
BIG = random.Random(1).randbytes(2 * PART + 1000)
ABOUT = About(len(BIG), "a node, a file, its time")
LOST: Fault = Break(DOWN, CUT, HEADLESS)
QUICK: list[Fault] = [
    Break(UP, CUT, HEADLESS),
    LOST,
    Answer(503, "SlowDown"),
    Answer(500, "InternalError", is_done=True),
]
ALL: list[Fault] = [
    *QUICK,
    Break(UP, CUT, 100),
    Break(UP, CUT, PART - 1),
    Break(UP, STALL, 100_000),
    Break(DOWN, STALL, HEADLESS),
    Break(DOWN, END, HEADLESS),
    Break(DOWN, CUT, 10),
    Break(DOWN, END, 10),
    Answer(500, "InternalError"),
]
IN_200: list[Fault] = [Answer(200, "InternalError"), Answer(200, "InternalError", is_done=True)]


@pytest.fixture(scope="module")
def proxy() -> Iterator[HttpProxy]:
    with closing(HttpProxy(("127.0.0.1", weed().port))) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def bucket() -> str:
    return weed().bucket()


@pytest.fixture
def store(proxy: HttpProxy, bucket: str) -> Iterator[S3Store]:
    store = open_any(
        f"s3://{bucket}/some/where",
        weed().options(endpoint=f"http://127.0.0.1:{proxy.port}"),
        LIMITS,
    )
    assert isinstance(store, S3Store)
    store.least = PART
    yield store
    proxy.plan = harmless
    proxy.faults.clear()


def chunks(content: bytes) -> list[memoryview]:
    return [memoryview(content)[at : at + (1 << 20)] for at in range(0, len(content), 1 << 20)]


def requests_of(proxy: HttpProxy, step: Callable[[], object]) -> list[tuple[str, int]]:
    """Each as its kind, and which of that kind it is."""
    seen: list[Request] = []
    proxy.plan = seen.append
    step()
    proxy.plan = harmless
    kinds = [request.kind for request in seen]
    return [(kind, kinds[: n + 1].count(kind)) for n, kind in enumerate(kinds)]


@pytest.mark.parametrize("how", ["create", "write"])
def test_an_upload_in_parts_succeeds_whatever_breaks_once(
    store: S3Store, proxy: HttpProxy, how: str
) -> None:
    fresh_names = (f"{how}/{n}" for n in itertools.count())
    put = store.create if how == "create" else store.write
    kinds = requests_of(proxy, lambda: put(next(fresh_names), chunks(BIG), ABOUT))
    assert kinds.count(("UploadPart", 3)) == 1
    tried = kinds if how == "create" else [("CompleteMultipartUpload", 1)]
    for number, (kind, nth) in enumerate(tried):
        faults = [LOST] if kind == "UploadPart" else sampled(QUICK, 2, number)
        for fault in [
            *(sampled(ALL, 3) if (kind, nth) == ("UploadPart", 2) else faults),
            *(IN_200 if kind == "CompleteMultipartUpload" else []),
        ]:
            proxy.plan, name = once(kind, fault, nth), next(fresh_names)
            put(name, chunks(BIG), ABOUT)
            proxy.plan = harmless
            assert read_all(store, name) == BIG, f"{fault} at {kind} {nth}"
    assert "CompleteMultipartUpload" in {kind for kind, _ in proxy.faults}


@pytest.mark.parametrize(
    ("content", "kind"),
    [(BIG, "CompleteMultipartUpload"), (b"ours", "PutObject")],
    ids=["parts", "whole"],
)
def test_no_answer_that_is_lost_lets_another_content_be_taken_for_ours(
    store: S3Store, proxy: HttpProxy, content: bytes, kind: str
) -> None:
    """Somebody else takes the name at the last moment; both contents are of one size."""
    other, direct = bytes(len(content)), open_any(store.url, weed().options())
    for n, fault in enumerate([*QUICK, *(IN_200 if content == BIG else [])]):
        name, broken = f"taken/{kind}-{n}", once(kind, fault)

        def overtaken(request: Request, name: str = name, broken: Plan = broken) -> Fault | None:
            if found := broken(request):
                direct.create(name, chunks(other))
            return found

        proxy.plan = overtaken
        with pytest.raises(Exists):
            store.create(name, chunks(content), About(len(content), "a node, a file, its time"))
        proxy.plan = harmless
        assert proxy.faults[-1] == (kind, fault), "else it was refused before"
        assert read_all(store, name) == other


SMALL: dict[str, Callable[[Store, str], object]] = {
    "create": lambda store, name: store.create(name, [b"new"]),
    "write": lambda store, name: store.write(name, [b"new"]),
    "size": lambda store, name: store.size(f"{name}.old"),
    "read": lambda store, name: read_all(store, f"{name}.old"),
    "names": lambda store, name: list(store.names("run/")),
    "delete": lambda store, name: store.delete(f"{name}.old"),
}


@pytest.mark.parametrize("what", SMALL)
def test_a_small_operation_succeeds_whatever_breaks_once(
    store: S3Store, proxy: HttpProxy, what: str
) -> None:
    fresh_names = (f"run/{what}-{n}" for n in itertools.count())

    def prepared() -> str:
        name = next(fresh_names)
        store.write(f"{name}.old", [b"old"])
        return name

    first = prepared()
    for number, (kind, nth) in enumerate(requests_of(proxy, lambda: SMALL[what](store, first))):
        for fault in sampled(ALL, 3, number + [*SMALL].index(what)):
            name = prepared()
            before = names(store, "run/")
            proxy.plan = once(kind, fault, nth)
            found = SMALL[what](store, name)
            proxy.plan = harmless
            where, after = f"{fault} at {kind} {nth}", {*before}
            if what in ("create", "write"):
                after.add(name)
                assert read_all(store, name) == b"new", where
            elif what == "delete":
                after.remove(f"{name}.old")
            elif what != "names":
                assert found == {"size": 3, "read": b"old"}[what], where
            assert names(store, "run/") == sorted(after), where
    assert proxy.faults


@pytest.mark.parametrize("side", [UP, DOWN])
@pytest.mark.parametrize("size", [3, (20 << 20) + 1000], ids=["small", "in parts"])
def test_a_connection_cut_anywhere_in_a_create_is_made_again(
    tmp_path: Path, side: str, size: int
) -> None:
    content = random.Random(2).randbytes(size)

    def check_created(name: str) -> None:
        store = through(tcp.port, tmp_path, replace(LIMITS, stall=4.0))
        store.create(name, chunks(content), About(size, "origin"))
        assert read_all(store, name) == content

    with closing(TcpProxy(("127.0.0.1", sshd().port))) as tcp:
        check_created("run/first")
        total = tcp.bytes[side] // tcp.requests["connection"]
        for n in sampled(range(12), 6, 0 if side == UP else 2):
            fault = Break(side, CUT, total * n // 12 + 300)
            tcp.plan = once("connection", fault, 1 if size == 3 else 1 + n // 4 % 2)
            check_created(f"run/{n}")
        assert tcp.faults
    assert list(tmp_path.rglob("*.part")) == []
