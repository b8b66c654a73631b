"""What is asked for is looked at wherever it lies."""

from __future__ import annotations

import json

import pytest

from ckptsync.errors import ConfigError, Corrupt, Incomplete
from ckptsync.merger import inputs as module
from ckptsync.merger.inputs import MergeRequest, open_sources
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.urls import Remote
from tests.support.remote_stores import KEEP, OUT, Counting, far, filled, reaching
from tests.support.vector import ROOT, vector

TWO_NODES = vector("hf-fsdp2-2node")
BUCKET, CHECKPOINT, BASE = (
    Remote("s3", "bucket"),
    Remote("s3", "bucket/run/checkpoint-4"),
    Remote("mem", "base"),
)


def in_run(**beside: str) -> dict[Remote, MemoryStore]:
    """A bucket with a run, whose one checkpoint is also seen as a place of its own."""
    bucket, own = MemoryStore(BUCKET.url), MemoryStore(CHECKPOINT.url)
    for source in TWO_NODES.sources:
        filled(own, source)
    for name, word in beside.items():
        bucket.write(f"run/{name}.json", [json.dumps(word).encode()])
    return {BUCKET: bucket, CHECKPOINT: own}


def test_configuration_is_found_in_the_run_around_a_checkpoint_elsewhere() -> None:
    prepared = open_sources(
        MergeRequest([CHECKPOINT], OUT, KEEP), reaching(in_run(config="c", tokenizer="t"))
    )
    assert [name for name, _ in prepared.job.beside] == ["tokenizer.json", "config.json"]
    assert "from s3://bucket/run: tokenizer.json, config.json" in prepared.job.notes


def test_configuration_and_base_model_may_lie_elsewhere() -> None:
    stores = {**far(TWO_NODES.sources), BASE: filled(MemoryStore("mem://base"), ROOT / "base")}
    sources = [place for place in stores if place != BASE]
    prepared = open_sources(
        MergeRequest(sources, OUT, KEEP, config_from=BASE, base=BASE), reaching(stores)
    )
    assert any(note.startswith("from mem://base: ") for note in prepared.job.notes)
    assert any("compared with the base model's 21 tensors" in note for note in prepared.job.notes)


def test_two_steps_and_two_saves_are_told_apart_elsewhere_too() -> None:
    one, two = far(TWO_NODES.sources).values()
    with pytest.raises(ConfigError, match="two steps of a training"):
        open_sources(
            MergeRequest(
                [Remote("mem", "a/checkpoint-4"), Remote("mem", "a/checkpoint-5")], OUT, KEEP
            ),
            reaching({Remote("mem", "a/checkpoint-4"): one, Remote("mem", "a/checkpoint-5"): two}),
        )
    stores = far([TWO_NODES.sources[0], *TWO_NODES.sources])
    name, (first, *_) = "pytorch_model_fsdp_0/__0_0.distcp", stores.values()
    data = bytearray(read_all(first, name))
    data[-2000] ^= 1
    first.write(name, [bytes(data)])
    with pytest.raises(Corrupt, match="differs between the directories given"):
        open_sources(MergeRequest([*stores], OUT, KEEP), reaching(stores))


def test_a_save_that_has_not_ended_over_another_is_seen_elsewhere_too() -> None:
    stores = far(TWO_NODES.sources)
    next(iter(stores.values())).write("pytorch_model_fsdp_0/.metadata.tmp", [b""])
    with pytest.raises(Incomplete, match="a newer save overwrites this checkpoint"):
        open_sources(MergeRequest([*stores], OUT, KEEP), reaching(stores))


def test_times_of_an_object_store_say_when_files_were_copied_and_are_not_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(module, "check_times", lambda written, *_: asked.append(written))
    open_sources(
        MergeRequest([*far(TWO_NODES.sources)], OUT, KEEP), reaching(far(TWO_NODES.sources))
    )
    assert asked == [{}, {}]


def test_planning_takes_few_requests() -> None:
    stores = {place: Counting(store) for place, store in far(TWO_NODES.sources).items()}
    open_sources(MergeRequest([*stores], OUT, KEEP), reaching(stores))
    shards = sum(
        name.endswith(".distcp") for store in stores.values() for name in content_names(store)
    )
    assert sum(sum(store.reads.values()) for store in stores.values()) <= shards + 2


def content_names(store: Counting) -> list[str]:
    return [entry.name for entry in store.names("")]
