"""Merging into a store: the same bytes as on a disk, whatever dies on the way."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Corrupt, Incomplete, StoreError
from ckptsync.merger.destination import merge
from ckptsync.merger.inputs import MergeRequest, open_sources
from ckptsync.merger.plan import MergeOptions, MergeResources
from ckptsync.stores.checkpoint_files import MERGING as RECORD
from ckptsync.stores.contract import UNKNOWN, About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.urls import Remote
from tests.support.crashing_store import Crash, Dying
from tests.support.files_in_memory import contents, safetensors_file
from tests.support.filled_stores import contents as content
from tests.support.merge_on_disk import merge_local
from tests.support.remote_stores import KEEP, OUT, Counting, far, filled, merge_into, reaching
from tests.support.vector import vector

HANDFUL = [
    "hf-fsdp2-2node",
    "hf-zero3-2node",
    "raw-ds-zero3-tied",
    "acc-ranks-fsdp1",
    "bin-sharded",
    "hf-fsdp2-lora",
]
TWO_NODES = vector("hf-fsdp2-2node")
WEIGHTS = [f"model-0000{n}-of-00004.safetensors" for n in range(1, 5)]
IN, ELSEWHERE = Remote("mem", "in"), Remote("mem", "elsewhere")
SHARD = "pytorch_model_fsdp_0/__0_0.distcp"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def here(tmp_path: Path) -> dict[str, bytes]:
    """What a merge on a disk writes."""
    merge_local(TWO_NODES.sources, tmp_path / "out", KEEP)
    return contents(tmp_path / "out")


@pytest.mark.parametrize("jobs", [1, 8])
@pytest.mark.parametrize("name", HANDFUL)
def test_elsewhere_the_same_bytes_are_written_as_here(name: str, jobs: int, tmp_path: Path) -> None:
    of = vector(name)
    wanted = merge_local(of.sources, tmp_path / "out", KEEP)
    out = MemoryStore("mem://out")
    found = merge_into(out, far(of.sources), work=MergeResources(jobs))
    assert content(out) == contents(tmp_path / "out")
    assert (found.files, found.notes) == (wanted.files, wanted.notes)


def dying() -> Iterable[tuple[MemoryStore, int]]:
    """What is left behind at every moment at which a merge can die, but when it has ended."""
    for lives in itertools.count():
        store = MemoryStore("mem://out")
        try:
            merge_into(Dying(store, lives), far(TWO_NODES.sources))
        except Crash:
            if lives < 2 or RECORD in content(store):
                yield store, lives
            else:
                assert content(store).keys() >= {*WEIGHTS, INDEX}
        else:
            assert lives > 20
            return


@cache
def lives_of_an_index() -> int:
    """How many calls a merge makes before that which writes its index."""
    return max(lives for store, lives in dying() if INDEX not in content(store))


def unfinished() -> MemoryStore:
    """What a merge has left that died when its index was to be written."""
    store = MemoryStore("mem://out")
    with pytest.raises(Crash):
        merge_into(Dying(store, lives_of_an_index()), far(TWO_NODES.sources))
    return store


def test_killed_at_any_moment_it_leaves_no_model_and_done_again_it_makes_only_what_is_missing(
    here: dict[str, bytes],
) -> None:
    digests = [f.digest for f in merge_into(MemoryStore(), far(TWO_NODES.sources)).files]
    for store, lives in dying():
        left = content(store)
        assert all(here[name] == data for name, data in left.items() if name != RECORD)
        if left:
            with pytest.raises(Incomplete, match="contains an unfinished merge"):
                open_sources(MergeRequest([OUT], ELSEWHERE, KEEP), reaching({OUT: store}))
        out, finished = Counting(store), left.keys() & set(WEIGHTS)
        found = merge_into(out, far(TWO_NODES.sources))
        assert content(store) == here, lives
        assert not finished & out.writes.keys()
        assert set(out.reads) & set(WEIGHTS) == finished
        assert [file.digest for file in found.files] == digests


def test_what_only_finished_files_need_is_not_read_again() -> None:
    size = 8 << 20
    model = {name: ("U8", (size,), bytes([n]) * size) for n, name in enumerate("abc")}
    source = MemoryStore("mem://in")
    source.write("model.safetensors", [safetensors_file(model)])
    for lives, left in [(0, 3), (8, 2), (14, 1), (20, 0)]:
        store = MemoryStore("mem://out")
        options = MergeOptions("keep", size + 1)
        with pytest.raises(Crash):
            merge_into(Dying(store, lives), {IN: source}, options=options)
        counting = Counting(source)
        merge_into(store, {IN: counting}, options=options)
        assert left * size <= counting.read < left * size + (1 << 20), lives
        assert content(store).keys() == {
            *(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)),
            INDEX,
        }


def test_of_a_damaged_file_that_an_earlier_merge_left_the_right_one_is_made(
    here: dict[str, bytes],
) -> None:
    store = unfinished()
    store.write(WEIGHTS[1], [here[WEIGHTS[1]][:-1] + b"!"])
    record = json.loads(read_all(store, RECORD))
    record["files"][WEIGHTS[0]]["notes"] = ["2 values became infinite"]
    store.write(RECORD, [json.dumps(record).encode()])
    found = merge_into(store, far(TWO_NODES.sources))
    assert content(store) == here
    assert "2 values became infinite" in found.notes
    assert (
        f"{WEIGHTS[1]}: does not match the checksum that an earlier merge recorded;"
        " ckptsync writes it again" in found.notes
    )


@pytest.mark.parametrize("name", ["stranger", "model.safetensors", "config.json"])
def test_where_something_else_is_nothing_is_written(name: str) -> None:
    store = MemoryStore("mem://out")
    store.write(name, [b"precious"])
    with pytest.raises(ConfigError, match=rf"mem://out: exists, with {name} in it"):
        merge_into(store, far(TWO_NODES.sources))
    assert content(store) == {name: b"precious"}


def test_beside_an_unfinished_merge_nothing_else_may_be() -> None:
    store = unfinished()
    store.write("precious", [b"x"])
    before = content(store)
    with pytest.raises(ConfigError, match="precious does not belong to the merge"):
        merge_into(store, far(TWO_NODES.sources))
    assert content(store) == before


class Late(Counting):
    """A store in which another merge begins after it was listed."""

    def __init__(self, store: Store, record: bytes) -> None:
        super().__init__(store)
        self._record = record

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        self.inner.write(name, [self._record])
        super().create(name, chunks, about)


@pytest.mark.parametrize(
    "options", [MergeOptions("bf16", 11_000), MergeOptions("keep", 20_000), KEEP]
)
def test_another_merge_does_not_go_on_with_it(options: MergeOptions) -> None:
    store, sources = unfinished(), far(TWO_NODES.sources)
    before = content(store)
    if options is KEEP:  # of a shard that was saved again, with the same shapes
        node = sources[Remote("mem", "node0")]
        node.write(SHARD, [read_all(node, SHARD)])
    for out in (store, Late(MemoryStore("mem://out"), before[RECORD])):
        with pytest.raises(
            ConfigError, match="an unfinished merge of other sources, or with other options"
        ):
            merge_into(out, sources, options=options)
    assert content(store) == before


class Changing(Counting):
    """A source that a trainer writes to while it is read."""

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        super().read_into(name, start, out)
        if out.nbytes > 1000:
            self.inner.write(name, [read_all(self.inner, name)])


@pytest.mark.parametrize("size", [20_000, 1 << 30])
def test_a_source_that_changes_during_the_merge_leaves_nothing_that_opens(size: int) -> None:
    store = MemoryStore("mem://out")
    changing = {place: Changing(source) for place, source in far(TWO_NODES.sources).items()}
    with pytest.raises(Incomplete, match="changed while it was read"):
        merge_into(store, changing, options=MergeOptions("keep", size))
    left = content(store).keys()
    assert RECORD in left
    assert (
        not {"model.safetensors", "config.json", "model.safetensors.index.json", WEIGHTS[-1]} & left
    )


def test_the_model_that_a_merge_is_filled_from_stays_as_it_is(tmp_path: Path) -> None:
    given, source, out = tmp_path / "given", MemoryStore("mem://in"), MemoryStore("mem://out")
    tensor = ("U8", (8,), b"8 bytes.")
    given.mkdir()
    weights = given / "model.safetensors"
    weights.write_bytes(safetensors_file({"model.a": tensor, "model.b": tensor}))
    (given / "config.json").write_text("{}")
    source.write("model.safetensors", [safetensors_file({"model.a": tensor})])
    stores = reaching({IN: source, OUT: out})
    requests = [
        MergeRequest([IN], place, MergeOptions("keep", 8), fill_from=given)
        for place in (OUT, tmp_path / "out")
    ]
    prepared = [open_sources(request, stores) for request in requests]
    with pytest.raises(Crash):  # after the first file
        merge(prepared[0], reaching({IN: source, OUT: Dying(out, 8)}))
    os.utime(weights, (1, 1))
    for merge_of_earlier_files in prepared:
        with pytest.raises(Incomplete, match="changed while it was read"):
            merge(merge_of_earlier_files, stores)
    with pytest.raises(ConfigError, match="an unfinished merge of other sources"):
        merge(open_sources(requests[0], stores), stores)


class Keeping(Counting):
    """A store of whose files none may be deleted."""

    def delete(self, name: str) -> None:
        raise StoreError(f"{name}: access denied")


def test_where_nothing_may_be_deleted_the_record_says_that_the_merge_has_ended(
    here: dict[str, bytes],
) -> None:
    store = MemoryStore("mem://out")
    found = merge_into(Keeping(store), far(TWO_NODES.sources))
    assert found.notes[-1].startswith(f"{RECORD} could not be deleted")
    assert json.loads(content(store).pop(RECORD))["ended"]
    assert {name: data for name, data in content(store).items() if name != RECORD} == here
    assert open_sources(MergeRequest([OUT], ELSEWHERE, KEEP), reaching({OUT: store})).job.plans
    store.write(INDEX, [here[INDEX][:-1] + b" "])  # other bytes, as many
    merge_into(Keeping(store), far(TWO_NODES.sources))
    store.delete(INDEX)
    merge_into(keeping := Keeping(store), far(TWO_NODES.sources))
    assert keeping.writes == {RECORD: 2, INDEX: 1}  # it is unfinished meanwhile
    again = Counting(store)
    merge_into(again, far(TWO_NODES.sources))
    assert set(again.writes) == set()
    assert content(store) == here


class Racing(Counting):
    """A store in which the same merge is done by somebody else at the first write."""

    def create(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        merge_into(self.inner, far(TWO_NODES.sources))
        super().create(name, chunks, about)

    def write(self, name: str, chunks: Iterable[Chunk], about: About = UNKNOWN) -> None:
        if name == WEIGHTS[1] and not self.writes[name]:
            self.writes[name] += 1
            merge_into(self.inner, far(TWO_NODES.sources))
        super().write(name, chunks, about)


def test_two_identical_merges_at_once_do_no_harm(here: dict[str, bytes]) -> None:
    for first in ("create", "write"):
        store = MemoryStore("mem://out")
        racing = Racing(store)
        if first == "write":
            racing.create = store.create  # type: ignore[method-assign]
        merge_into(racing, far(TWO_NODES.sources))
        assert content(store) == here


def test_statistics_are_of_every_file_though_some_are_there(here: dict[str, bytes]) -> None:
    store = unfinished()
    found = merge_into(store, far(TWO_NODES.sources), work=MergeResources(statistics=True))
    assert found.statistics is not None
    assert len(found.statistics) == len(found.tensors)
    assert content(store) == here


@pytest.mark.parametrize(
    "data", [b'{"plan": 1}', b'{"plan":"\xff"}', b"[" * 100_000, b" " * ((32 << 20) + 1)], ids=len
)
def test_a_record_that_is_none_is_said_and_left_alone(data: bytes) -> None:
    store = MemoryStore("mem://out")
    store.write(RECORD, [data])
    with pytest.raises(Corrupt, match=r"not a record of a merge|bytes, at most"):
        merge_into(store, far(TWO_NODES.sources))
    assert content(store) == {RECORD: data}


def test_configuration_is_found_in_the_run_around_a_checkpoint_elsewhere() -> None:
    bucket, own = MemoryStore("s3://bucket"), MemoryStore("s3://bucket/run/checkpoint-4")
    for source in TWO_NODES.sources:
        filled(own, source)
    for name in ("config", "tokenizer"):
        bucket.write(f"run/{name}.json", [b"{}"])
    checkpoint = Remote("s3", "bucket/run/checkpoint-4")
    stores = reaching({Remote("s3", "bucket"): bucket, checkpoint: own})
    prepared = open_sources(MergeRequest([checkpoint], OUT, KEEP), stores)
    assert [name for name, _ in prepared.job.beside] == ["tokenizer.json", "config.json"]
    assert "from s3://bucket/run: tokenizer.json, config.json" in prepared.job.notes


def test_planning_takes_few_requests() -> None:
    stores = {place: Counting(store) for place, store in far(TWO_NODES.sources).items()}
    open_sources(MergeRequest([*stores], OUT, KEEP), reaching(stores))
    names = [entry.name for store in stores.values() for entry in store.names("")]
    shards = sum(name.endswith(".distcp") for name in names)
    assert sum(sum(store.reads.values()) for store in stores.values()) <= shards + 2
