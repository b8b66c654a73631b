"""The worker role: looks and sends."""

from pathlib import Path

import pytest

import ckptsync
from ckptsync.config.loading import read
from ckptsync.config.values import Config
from ckptsync.daemon.watching import worker_options
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from ckptsync.worker.options import RunDir, WorkerOptions

pytestmark = pytest.mark.filterwarnings("ignore:Callback with id:RuntimeWarning")

DATA = Path(ckptsync.__file__).parent / "demo_data"


def configured(tmp_path: Path, text: str) -> tuple[Config, Store]:
    store = create_store(str(tmp_path / "store"))
    return read(text.format(tmp=tmp_path) + f"store: {{url: {store.url}}}\n", "c", {}), store


def test_what_the_configuration_says_of_a_worker_is_what_it_is_told(tmp_path: Path) -> None:
    text = "worker: {{runs: ['{tmp}/out'], order: newest, superseded: drop, send: weights, exclude: ['rng*'], include: ['*'], quiet: 1s, unmarked: 2s"
    config, _ = configured(
        tmp_path, text + ", keep_pins: 3, spool_budget: 1GB, spool_full: 'every:5', clean: verified, keep_local: 4}}\n"
    )
    runs = (RunDir("out", tmp_path / "out"),)
    assert worker_options(config, "n0", runs) == WorkerOptions(
        "n0", runs, 1, 2, 3, 4, "newest", "drop", "weights", ("*",), ("rng*",), 10**9, "every:5", "verified", 4
    )
