"""The head's and the verifier's ticks."""

from pathlib import Path

import ckptsync
from ckptsync.config.loading import read
from ckptsync.daemon.heading import Proving, head
from ckptsync.stores.opening import create_store
from ckptsync.worker.push import push_now

DATA = Path(ckptsync.__file__).parent / "demo_data"


def test_what_is_complete_is_consolidated_and_then_proved(tmp_path: Path) -> None:
    store = create_store(str(tmp_path))
    config = read(f"roles: [head]\nstore: {{url: {tmp_path}}}\n", "c", {})
    for node in ("node0", "node1"):
        push_now(DATA / "zero3" / node, store, node, "zero3")
    assert any("phase=sealed run=zero3" in line.text for line in head(config, store)().lines)
    hints: list[int] = []
    proving = Proving(config, store)
    proving.hint = lambda: hints.append(1)
    assert any("phase=proved run=zero3" in line.text for line in proving.look().lines)
    assert hints == [], "no other place waits"
