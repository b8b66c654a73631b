"""What a head compares of a run's models, by their records."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ckptsync.head.weights_comparison import record_weights
from ckptsync.records.io import create_record, decode
from ckptsync.records.model_record import ModelFile, ModelRecord, ModelTensor
from ckptsync.records.weights_record import WeightsFinding, WeightsRecord, tensors_digest
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore


class CountingStore(MemoryStore):
    """Counts how often each name is read."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = Counter[str]()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.reads[name] += 1
        super().read_into(name, start, out)


def test_the_first_model_of_a_run_is_read_once_for_all_that_are_compared_with_it() -> None:
    store = CountingStore()
    tensors = (ModelTensor("a", "F32", (2,), "m.safetensors", 0, 8, "0" * 64),)
    file = ModelFile("m.safetensors", 8, "0" * 64)
    names: dict[int, str] = {}
    for step in (1, 2, 3, 4, 5, 7, 8, 6):
        location = f"checkpoint-{step}"
        model = ModelRecord("run", location, location, 0, (), {}, (file,), tensors)
        values = ((0, 1, 0, 1.0, 1.0, 1.0),)  # infinity, as the first model may have had it
        weights = WeightsRecord("run", location, location, 0, tensors_digest(tensors), values)
        if step == 6:
            store.reads.clear()
            record_weights(store, model, weights, ("it may lack tensors",), 2.0)
            records = [*store.names("run/")]
            record_weights(store, model, weights, ("it may lack tensors",), 2.0)
            assert [*store.names("run/")] == records, "whoever does it again writes nothing"
        else:
            names[step] = create_record(store, model)[0]
            old = tuple(WeightsFinding(kind, kind) for kind in ("jump", "smaller"))
            create_record(store, replace(weights, findings=old, compared=()))
    assert store.reads[names[1]] == store.reads[names[5]] == 2, "once in each call"
    for own, earlier in (("6/weights-0", (5, 4, 3)), ("8/weights-1", (7, 6, 5))):
        (name,) = [e.name for e in store.names("run/") if f"/checkpoint-{own}-" in e.name]
        record = decode(name, read_all(store, name))
        assert isinstance(record, WeightsRecord)
        assert record.compared == tuple(f"checkpoint-{step}" for step in earlier)
        kinds = [finding.kind for finding in record.findings]
        assert kinds == ["same", "smaller"], "that tensors may be missing is as true as before"
