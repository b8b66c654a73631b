"""Which files are a training's logs, and when they are sent."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptsync.catalogue.cached import read_catalogue
from ckptsync.checkpoint_dirs import is_plain_name
from ckptsync.errors import StoreError
from ckptsync.head.orphans import find_orphans
from ckptsync.stores.contract import Entry, StoreWrapper, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.opening import open_store
from ckptsync.walk import Stat
from ckptsync.worker.logs import LIMIT, RunLogs, fit_limit, log_kind
from ckptsync.worker.options import RunDir
from tests.support.small_store import make

GROWS = (
    "trainer_log.jsonl",
    "logging.jsonl",
    "runs/Nov28_host/events.out.tfevents.1700000000.host.1.0",
    "runs/Nov28_host/1700000000.1/events.out.tfevents.1700000000.host.1.1",
    "tb/20261128/events.out.tfevents.1",
    "events.out.tfevents.1",
    "lightning_logs/version_0/metrics.csv",
    "lightning_logs/version_0/events.out.tfevents.1",
)
WRITTEN = (
    "all_results.json",
    "train_results.json",
    "eval_results.json",
    "trainer_state.json",
    "args.json",
    "train_args.json",
    "llama3_lora_sft.yaml",
    "config.yml",
    "tokenizer.yaml",
    "monkey.yaml",
    ".hydra/config.yaml",
    "lightning_logs/version_12/hparams.yaml",
)
NONE = (
    "training_args.bin",
    "model.safetensors",
    "config.json",
    "data.jsonl",
    ".env",
    "secrets.yaml",
    "api_key.yaml",
    "hf-token.yaml",
    "id_rsa.key",
    "checkpoint-4/trainer_state.json",
    "checkpoint-4/config.yaml",
    "runs/notes.txt",
    "src/config.yaml",
    "lightning_logs/version_0/checkpoints/config.yaml",
    "runs/back\\slash/events.out.tfevents.1",
)


@pytest.mark.parametrize("path", [*GROWS, *WRITTEN, *NONE])
def test_a_log_is_known_by_its_path(path: str) -> None:
    kind = log_kind(path)
    assert (kind is not None, bool(kind and kind.grows)) == (path not in NONE, path in GROWS)


def test_the_smallest_logs_are_carried_where_not_all_may_be() -> None:
    files = [Stat(name, size, 0, 0, 0) for name, size in [("a", 7), ("b", 1), ("c", 2)]]
    fits, others = fit_limit(files, 9)
    assert ([f.path for f in fits], [f.path for f in others]) == (["b", "c"], ["a"])
    assert fit_limit(files, 10) == ([files[1], files[2], files[0]], [])


class Counted(StoreWrapper):
    """A store that counts what it is asked."""

    asked = 0

    def names(self, prefix: str) -> Iterator[Entry]:
        self.asked += 1
        return super().names(prefix)

    def dirs(self, prefix: str, start: str = "") -> list[str]:
        self.asked += 1
        return super().dirs(prefix, start)

    def size(self, name: str) -> int:
        self.asked += 1
        return super().size(name)

    def write(self, name: str, *more: object) -> None:
        self.asked += 1
        super().write(name, *more)  # type: ignore[arg-type]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out" / "runs" / "a").mkdir(parents=True)
    return tmp_path / "out"


def logs(out: Path, store: StoreWrapper | MemoryStore) -> RunLogs:
    return RunLogs(RunDir("sft", out), "n0", store)


def stored(store: MemoryStore | StoreWrapper) -> dict[str, bytes]:
    return {
        e.name.removeprefix("sft/logs/n0/"): read_all(store, e.name)
        for e in store.names("sft/logs/")
    }


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_only_what_has_changed_is_sent_and_an_idle_run_costs_the_store_nothing(out: Path) -> None:
    store = Counted(MemoryStore())
    carried = logs(out, store)
    assert (carried.carry(), store.asked) == ((), 0)
    log, events = out / "trainer_log.jsonl", out / "runs/a/events.out.tfevents.1"
    log.write_text("{}\n")
    events.write_bytes(b"\0events")
    assert carried.carry() == ()
    assert stored(store) == {"trainer_log.jsonl": b"{}\n", "runs/a/" + events.name: b"\0events"}
    before = store.asked
    carried.carry()
    assert store.asked == before
    append(log, "{}\n")
    carried.carry()
    assert store.asked == before + 1
    assert stored(store)["trainer_log.jsonl"] == b"{}\n{}\n"


def test_another_process_sends_nothing_again_that_is_in_the_store(out: Path) -> None:
    (out / "trainer_log.jsonl").write_text("{}\n")
    inner = MemoryStore()
    logs(out, inner).carry()
    [before] = inner.names("sft/logs/")
    again = logs(out, inner)
    again.carry()
    append(out / "trainer_log.jsonl", "{}\n")
    assert [*inner.names("sft/logs/")] == [before]
    again.carry()
    assert stored(inner) == {"trainer_log.jsonl": b"{}\n{}\n"}


def test_what_the_store_refuses_is_sent_the_next_time(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    carried = logs(out, store)
    (out / "trainer_log.jsonl").write_text("{}\n")

    def refuse(*_: object) -> None:
        raise StoreError("away")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", refuse)
        with pytest.raises(StoreError):
            carried.carry()
    carried.carry()
    assert stored(store) == {"trainer_log.jsonl": b"{}\n"}


@pytest.mark.parametrize("is_restarted", [False, True], ids=["seen", "while no worker ran"])
@pytest.mark.parametrize("text", ["new\n", "a new one that is longer than the old one\n", ""])
def test_a_log_that_was_begun_anew_leaves_the_old_one(
    out: Path, text: str, *, is_restarted: bool
) -> None:
    store, log = MemoryStore(), out / "trainer_log.jsonl"
    log.write_text("old\nold\n")
    (out / "all_results.json").write_text('{"loss": 1}')
    carried = logs(out, store)
    carried.carry()
    log.write_text(text)
    (out / "all_results.json").write_text('{"loss": 2}')
    (logs(out, store) if is_restarted else carried).carry()
    stored_logs = stored(store)
    assert stored_logs.pop("trainer_log.jsonl") == text.encode()
    assert stored_logs.pop("all_results.json") == b'{"loss": 2}'
    [(name, data)] = stored_logs.items()
    assert name.startswith("trainer_log.jsonl.")
    assert name.endswith("Z")
    assert data == b"old\nold\n"


def test_no_link_is_followed_and_no_pipe_is_waited_for(out: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "events.out.tfevents.1").write_text("secret")
    (out / "config.yaml").symlink_to(secret / "events.out.tfevents.1")
    (out / "tb").symlink_to(secret)
    (out / "runs" / "b").symlink_to(secret)
    os.mkfifo(out / "trainer_log.jsonl")
    store = MemoryStore()
    assert logs(out, store).carry() == ()
    assert stored(store) == {}


def test_more_than_the_limit_is_said(out: Path) -> None:
    with (out / "trainer_log.jsonl").open("wb") as file:
        file.truncate(LIMIT + 1)
    (out / "all_results.json").write_text("{}")
    store = MemoryStore()
    [note] = logs(out, store).carry()
    assert "trainer_log.jsonl" in note
    assert stored(store) == {"all_results.json": b"{}"}


def test_a_checkpoint_that_is_named_as_the_directory_of_logs_is_left_alone(out: Path) -> None:
    store = MemoryStore()
    store.write("sft/.ckptsync/logs/manifest-n0-0-0123456789abcdef.json", [b"{}"])
    (out / "trainer_log.jsonl").write_text("{}\n")
    [note] = logs(out, store).carry()
    assert "is a checkpoint" in note
    assert stored(store) == {}
    assert not is_plain_name("logs")
    assert not is_plain_name("Logs")


def test_logs_are_no_location_and_no_orphan(out: Path, tmp_path: Path) -> None:
    store = open_store(str(make(tmp_path / "store")))
    (out / "trainer_log.jsonl").write_text("{}\n")
    before = read_catalogue(store).summaries
    RunLogs(RunDir(before[0].run, out), "n0", store).carry()
    assert read_catalogue(store).summaries == before
    assert [*find_orphans(store, 1e12)] == []
