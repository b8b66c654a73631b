"""A head's merge from a store that is far: few requests, made early, and every byte checked."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.merge.plan import MergeOptions, MergeResources
from ckptsync.stores.contract import StoreWrapper, read_all
from ckptsync.stores.memory import MemoryStore
from tests.support.files_in_memory import safetensors_file
from tests.support.filled_stores import contents, send
from tests.support.vector import bits

COUNT, SIZE = 400, 40_000  # tensors, and the bytes of each


class Far(StoreWrapper):
    """Counts the reads of shards, and how many are under way at once; each takes a while."""

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.reads = self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with self._lock:
            self.reads += name.endswith(".safetensors")
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(0.002)
        super().read_into(name, start, out)
        with self._lock:
            self.at_once -= 1


def test_a_head_reads_ahead_and_joins_what_is_near(tmp_path: Path) -> None:
    content = {f"w{n:03}": ("U8", (SIZE,), random.Random(n).randbytes(SIZE)) for n in range(COUNT)}
    files = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for file, own in zip(files, (sorted(content)[::2], sorted(content)[1::2]), strict=True):
        (tmp_path / file).write_bytes(safetensors_file({name: content[name] for name in own}))
    weight_map = {name: files[n % 2] for n, name in enumerate(sorted(content))}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    store = MemoryStore()
    send(store, tmp_path, "node0")
    far = Far(store)
    consolidate_location(
        far, "run", "checkpoint-4", HeadOptions(MergeOptions("keep")), work=MergeResources(2)
    )
    (name,) = (n for n in contents(store) if "consolidated" in n and n.endswith(".safetensors"))
    (tmp_path / "made.safetensors").write_bytes(read_all(store, name))
    assert bits(tmp_path / "made.safetensors") == content
    assert far.reads < COUNT / 4
    assert far.most_at_once > 1
