"""configs/s3-*.json: what a worker, a head and garbage collection do is allowed, by S3's rules and
by a real server, and nothing else is.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from shutil import copytree
from typing import get_args

import pytest

import ckptsync
from ckptsync.errors import Corrupt, NotFound, StoreError
from ckptsync.head.agreement import Agreement
from ckptsync.head.consolidate import HeadOptions
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.head.gc import RetentionRequest, apply_retention
from ckptsync.head.removal import keep
from ckptsync.head.retention_rules import Rules
from ckptsync.records.store_paths import (
    RecordKind,
    RecordName,
    checkpoint_of,
    clock_name,
    consolidated_prefix,
    file_name,
    node_facts_name,
    node_file_name,
    own_prefixes,
    sending_prefix,
)
from ckptsync.safe_names import STORE_FILE
from ckptsync.status import heartbeat
from ckptsync.status.heartbeat import Heartbeat
from ckptsync.stores.contract import About, Store
from ckptsync.stores.opening import create_store, open_any, open_store
from ckptsync.worker.options import RunDir, WorkerOptions
from ckptsync.worker.worker import Worker
from tests.support.fault_proxy import HttpProxy
from tests.support.filled_stores import flip
from tests.support.head_in_process import consolidate_due, verify_next
from tests.support.network_faults import UP, Answer, Request
from tests.support.retention_stores import FIRST, fill
from tests.support.s3_permissions import (
    CONFIGS,
    Asked,
    Recorder,
    Statement,
    actions,
    is_allowed,
    policy,
    refused,
)
from tests.support.seaweedfs import weed
from tests.support.worker_in_process import push_now, tick

DATA = Path(ckptsync.__file__).parent / "demo_data" / "fsdp2"
SHARD = "fsdp2/checkpoint-4/pytorch_model_fsdp_0/__0_0.distcp"
MODEL = "fsdp2/consolidated/checkpoint-4/model.safetensors"
RECORDS = "fsdp2/.ckptsync/checkpoint-4"
DIGEST = "0123456789abcdef"
PIECE = memoryview(bytes(1 << 20))
WEEK = 8 * 86400.0
EVERYTHING: Statement = {"Effect": "Allow", "Action": "*", "Resource": "*"}


class Gone(BaseException):
    """The process ended here."""


@dataclass
class Story:
    """Everything that a worker and a head ask of S3, under the policies that are pasted for them,
    in one bucket.
    """

    bucket: str
    worker: list[Asked]
    head: list[Asked]
    reports: list[str]


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    bucket = weed().bucket()
    address = ("127.0.0.1", weed().port)
    with closing(Recorder(address)) as by_worker, closing(Recorder(address)) as by_head:
        worker = store_of(bucket, "policy-worker", by_worker, create_store)
        out = tmp_path_factory.mktemp("fsdp2")
        work(worker, out, by_worker)
        head = store_of(bucket, "policy-head", by_head, open_store)
        anybody = open_any(f"s3://{bucket}/store", weed().options())
        anybody.write(MODEL, [b"of a head that died, with other options"])
        reports = [lead(head, 0.0, by_head)]
        flip(anybody, SHARD, 40_000)
        reports.append(lead(head, WEEK, by_head))
        repair(worker, out)
        reports.append(lead(head, 2 * WEEK, by_head))
        return Story(bucket, by_worker.asked, by_head.asked, reports)


def store_of(bucket: str, name: str, recorder: Recorder, opened: Callable[..., Store]) -> Store:
    options = weed().identity(*policy(name, bucket, "store"))
    options["endpoint_url"] = f"http://127.0.0.1:{recorder.port}"
    return opened(f"s3://{bucket}/store", options)


def work(store: Store, out: Path, recorder: Recorder) -> None:
    """What a worker does in its life: beat, send, be killed in a large file and go on with it, give
    one up whose source changed.
    """
    heartbeat.write(store, Heartbeat("n0", "i", "m", 1, "b", 0.0, ("worker",), "0"))
    assert heartbeat.read(store, "n0", ("worker",))
    copytree(DATA / "node0" / "checkpoint-4", out / "checkpoint-4")
    worker = worker_on(store, out)
    assert not [f for now in (0.0, 10.0, 60.0, 600.0) for f in tick(worker, now).failures]
    push_now(DATA / "node1", store, "node1", "fsdp2")
    large(store, "fsdp2/checkpoint-9/large", recorder)


def worker_on(store: Store, out: Path) -> Worker:
    return Worker(WorkerOptions("n0", RunDir("fsdp2", out)), store)


def large(store: Store, name: str, recorder: Recorder) -> None:
    with pytest.raises(Gone):
        store.write(name, dying(17, Gone, recorder), About(20 << 20, "n0:large"))
    with pytest.raises(NotFound):
        store.size(name)
    store.write(name, [PIECE] * 20, About(20 << 20, "n0:large"))
    changing = dying(17, lambda: ValueError("changed"), recorder)
    with pytest.raises(ValueError, match="changed"):
        store.write(f"{name}2", changing, About(20 << 20, "n0:large2"))


def dying(
    count: int, error: Callable[[], BaseException], recorder: Recorder
) -> Iterator[memoryview]:
    """Not before the server has the first part."""
    sent = recorder.bytes[UP]
    for _ in range(count):
        yield PIECE
    assert recorder.passed(sent + (16 << 20), 30)
    raise error()


def lead(store: Store, later: float, recorder: Recorder) -> str:
    """What a head does with it; the verdict."""
    heartbeat.write(store, Heartbeat("head", "i", "m", 1, "b", 0.0, ("head",), "0"))
    assert not consolidate_due(store, HeadOptions(), statistics=True).failed
    if not later:
        large(store, "fsdp2/consolidated/checkpoint-9/large", recorder)
    report = verify_next(store, VerifyPolicy(), time.time() + later)
    assert report
    return report.verdict


def repair(store: Store, out: Path) -> None:
    worker = worker_on(store, out)
    assert [r for now in (0.0, 10.0, 60.0, 600.0) for r in tick(worker, now).repairs]


def statements(name: str, story: Story) -> list[Statement]:
    return [*policy(f"policy-{name}", story.bucket, "store"), *policy("policy-kms")]


def test_under_the_policies_everything_goes_its_way_on_a_real_server(story: Story) -> None:
    assert story.reports == ["ok", "damaged", "ok"]


def test_the_worker_may_do_all_that_it_asks_for_and_deletes_nothing(story: Story) -> None:
    assert refused(story.worker, statements("worker", story)) == []
    assert "s3:DeleteObject" not in actions(statements("worker", story)) | {
        a.action for a in story.worker
    }


def test_the_head_may_do_all_that_it_asks_for_and_deletes_only_what_is_in_the_way_of_a_model(
    story: Story,
) -> None:
    assert refused(story.head, statements("head", story)) == []
    deleted = {a.resource for a in story.head if a.action == "s3:DeleteObject"}
    assert deleted == {f"arn:aws:s3:::{story.bucket}/store/{MODEL}"}


def test_the_bucket_lets_everything_through_over_tls_and_nothing_without(story: Story) -> None:
    rules = [EVERYTHING, *policy("bucket-policy", story.bucket, "store")]
    assert {a.resource for a in refused([*story.worker, *story.head], rules)} == set()
    insecure = {"aws:SecureTransport": "false"}
    plain = [
        Asked(a.action, a.resource, {**a.facts, **insecure})
        for a in story.worker
        if "s3:" in a.action
    ]
    assert refused(plain, rules) == plain


def test_the_bucket_refuses_to_write_a_record_twice() -> None:
    rules = [EVERYTHING, *policy("bucket-policy")]
    anew = {"aws:SecureTransport": "true", "s3:ObjectCreationOperation": "true"}
    records = [name for kind in get_args(RecordKind) for name in names_of(kind)]
    for name in (*records, f"{RECORDS}/agreement-0.json", ".ckptsync/store.json"):
        record = put_of(name).resource
        once = Asked("s3:PutObject", record, {**anew, "s3:if-none-match": "*"})
        assert is_allowed(once, rules), name
        assert not is_allowed(Asked("s3:PutObject", record, anew), rules), name


RECORDS_OF = {
    "manifest": "worker",
    "model": "head",
    "weights": "head",
    "report": "head",
    "event": "head",
    "tombstone": "gc",
    "keep": "gc",
    "join": "repair",
}
FILES_OF: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "agreement": ("head", lambda run, at: Agreement(run, at, 3, b"").name),
    "file": ("worker", lambda run, at: file_name(run, at, "sub/model-0.json")),
    "node's file": ("worker", lambda run, at: node_file_name(run, at, "n0", "x/agreement-0.bin")),
    "sending": ("worker", lambda run, at: sending_prefix(run, checkpoint_of(at)) + "n0"),
    "consolidated": ("head", lambda run, at: consolidated_prefix(run, at) + "model.safetensors"),
    "clock": ("worker head", lambda *_: clock_name("n0")),
    "node": ("worker head", lambda *_: node_facts_name("n0")),
    "store": ("worker head", lambda *_: STORE_FILE),
}
WRITERS = RECORDS_OF | {kind: writers for kind, (writers, _) in FILES_OF.items()}
"""What of a store which policy lets be written; `repair` may write everything."""
PLACES = [
    (run, location)
    for run in ("a", "team", "team-ab", "llama.1", "consolidated-2", "x~y")
    for location in ("checkpoint-5", "checkpoint-5~0a1b2c3d", "final", "tag-_.0123abcd", "s-1.ckpt")
]


def names_of(kind: str) -> list[str]:
    """Names of that kind in a store, built by the code that writes them."""
    if kind in FILES_OF:
        return [FILES_OF[kind][1](run, location) for run, location in PLACES]
    node = "n0" if kind == "manifest" else ""
    return [str(RecordName(run, at, kind, node, 7, DIGEST)) for run, at in PLACES]  # type: ignore[arg-type]


def test_every_kind_of_record_has_a_writer() -> None:
    assert RECORDS_OF.keys() == set(get_args(RecordKind))


def policies() -> dict[str, list[Statement]]:
    named = {p.stem.removeprefix("s3-policy-") for p in CONFIGS.glob("s3-policy-*.json")}
    return {name: policy(f"policy-{name}") for name in sorted(named - {"kms"})}


def put_of(name: str, prefix: str = "PREFIX/") -> Asked:
    return Asked("s3:PutObject", f"arn:aws:s3:::BUCKET/{prefix}{name}")


@pytest.mark.parametrize("kind", WRITERS)
def test_only_its_writers_may_write_a_record(kind: str) -> None:
    for name in names_of(kind):
        may = {who for who, rules in policies().items() if is_allowed(put_of(name), rules)}
        assert may == {*WRITERS[kind].split(), "repair"}, name
        for outside in ("PREFIX2/", "PREFIX", "other/PREFIX/", ""):
            for rules in policies().values():
                assert not is_allowed(put_of(name, outside), rules)
        for who, rules in policies().items():
            deletes = Asked("s3:DeleteObject", put_of(name).resource)
            is_way = who == "gc" or (who == "head" and kind == "consolidated")
            assert is_allowed(deletes, rules) == is_way, (who, name)


@pytest.mark.parametrize("kind", WRITERS)
def test_a_key_of_one_node_of_one_run_writes_what_is_theirs(kind: str) -> None:
    """By the list of resources in docs/s3.md."""
    told = (CONFIGS.parent / "docs" / "s3.md").read_text()
    [listed] = re.findall(r"```json\n(\[.*?\])\n```", told, re.DOTALL)
    own = json.loads(listed.replace("RUN", "team").replace("NODE", "n0"))
    rules = [
        {**s, "Resource": own} if s["Sid"] == "SendFilesAndReadThemBack" else s
        for s in policy("policy-worker")
    ]
    is_any = kind in ("clock", "node")
    for name, (run, location) in zip(names_of(kind), PLACES, strict=True):
        is_own = run == "team" and WRITERS[kind] == "worker"
        if kind == "file":
            is_own = is_own and location.startswith(("checkpoint-", "final"))
        assert is_allowed(put_of(name), rules) == (is_own or is_any), name
        other = put_of(name.replace("n0", "m1"))
        assert other == put_of(name) or not is_allowed(other, rules)


def test_names_that_no_key_is_kept_from_are_no_records() -> None:
    """What ``*`` matches in a policy, slashes too, leads to no other run."""
    rules = policy("policy-worker")
    for run, location in (
        ("team/consolidated", "checkpoint-4"),
        ("team", ".ckptsync"),
        ("team", "consolidated"),
        (".ckptsync", "nodes"),
        ("team/checkpoint-4", "x-1"),
    ):
        name = str(RecordName(run, location, "manifest", "n0", 7, DIGEST))
        if is_allowed(put_of(name), rules):
            with pytest.raises(Corrupt):
                own_prefixes(run, location)


def test_a_worker_may_send_files_of_a_trainer_whose_names_are_like_a_heads() -> None:
    rules = policy("policy-worker")
    for name in (
        "checkpoint-4/consolidated.00.pth",
        f"checkpoint-4/model-9-{DIGEST}.json",
        "checkpoint-4/agreement-0.json",
        ".ckptsync/checkpoint-4/files/n0/consolidated.00.pth",
    ):
        assert is_allowed(put_of(f"run/{name}"), rules), name
    # as docs/s3.md says: with the run's name in the policy, its own directories may be named so
    inner = put_of("run/epoch_0_step_20/model/consolidated/config.json")
    by_run = json.loads(
        json.dumps(rules).replace("PREFIX/*/consolidated/", "PREFIX/run/consolidated/")
    )
    assert not is_allowed(inner, rules)
    assert is_allowed(inner, by_run)


def test_retention_needs_no_more_than_that(story: Story) -> None:
    """Two checkpoints of a run of its own: the older one is marked and removed, the other one kept
    by hand.
    """
    url = f"s3://{story.bucket}/store"
    for n in (1, 2):
        fill(open_any(url, weed().options()), f"checkpoint-{n}", FIRST + n, run="kept")
    both = [s for who in ("head", "gc") for s in policy(f"policy-{who}", story.bucket, "store")]
    collector = open_any(url, weed().identity(*both))
    assert keep(collector, "kept", "checkpoint-2")
    asked = RetentionRequest(lambda _: Rules(keep_last=1), 0.0, "kept")
    done = [
        [(d.location, d.result) for d in apply_retention(collector, asked).done] for _ in range(2)
    ]
    assert done == [[("checkpoint-1", "marked")], [("checkpoint-1", "removed")]]


def test_what_is_not_there_is_told_from_what_may_not_be_read(story: Story) -> None:
    """S3 says 403 of a missing key to who may list a prefix only.

    SeaweedFS says 404, so the proxy has to.
    """

    def forbid(request: Request) -> Answer | None:
        return Answer(403, "AccessDenied") if request.kind in ("HeadObject", "GetObject") else None

    options = weed().identity(*policy("policy-worker", story.bucket, "store"))
    with closing(HttpProxy(("127.0.0.1", weed().port), forbid)) as proxy:
        options["endpoint_url"] = f"http://127.0.0.1:{proxy.port}"
        store = open_any(f"s3://{story.bucket}/store", options)
        for name, kind, words in ((SHARD[:-1], NotFound, "not in"), (SHARD, StoreError, "denied")):
            with pytest.raises(kind, match=words):
                store.size(name)
            with pytest.raises(kind, match=words):
                store.read_into(name, 0, memoryview(bytearray(1)))
