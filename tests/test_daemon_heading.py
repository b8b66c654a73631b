"""The roles of the head: real child processes over a real store."""

import shutil
from pathlib import Path

import pytest

import ckptsync
from ckptsync.catalogue import kept
from ckptsync.catalogue.fresh import fresh
from ckptsync.config.loading import read
from ckptsync.config.schema import Config
from ckptsync.daemon.heading import Catalogues, Heads, of_head
from ckptsync.head.consolidate import HeadOptions, one
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from ckptsync.verify.location import verify_and_report as verify
from ckptsync.worker.push import push_now
from tests.cli_store import make
from tests.ticks import until

DATA = Path(ckptsync.__file__).parent / "demo_data"
PATIENCE = 60


def configured(path: Path, more: str = "") -> tuple[Config, Store]:
    store = create_store(str(path))
    return read(f"roles: [head, verifier]\nstore: {{url: {path}}}\n{more}", "c", {}), store


def fail(e: BaseException) -> None:
    raise e


def arrive(store: Store, *runs: str) -> None:
    for run in runs:
        for node in ("node0", "node1"):
            push_now(DATA / run / node, store, node, run)


def word(store: Store) -> list[str]:
    return [snapshot.status for snapshot in fresh(store).readable]


def works(heads: Heads, store: Store, wanted: list[str]) -> bool:
    """Whether this comes to be, when every tick runs as often as its hints ask for."""
    asked = [1]
    for role in heads.roles:
        role.tick.soon = lambda _: asked.append(1)

    def is_so() -> bool:
        if asked and not heads.children.jobs():
            asked.clear()
            for role in heads.roles:
                role.tick()
        return word(store) == wanted

    return until(is_so, PATIENCE)


def test_what_is_complete_is_consolidated_and_proved_as_soon_as_children_end(tmp_path: Path) -> None:
    config, store = configured(tmp_path)
    arrive(store, "fsdp2", "zero3")
    heads = of_head(config, store, fail)
    assert works(heads, store, ["VERIFIED", "VERIFIED"])
    assert [role.errors() for role in heads.roles] == [(), ()]


def test_what_fails_is_told_with_its_hint_and_waits_and_holds_up_no_other(tmp_path: Path) -> None:
    config, store = configured(tmp_path, "head: {config_from: {fsdp2: /nowhere}}\n")
    arrive(store, "fsdp2", "zero3")
    heads = of_head(config, store, fail)
    assert works(heads, store, ["COMPLETE", "VERIFIED"])
    [head, _] = heads.roles
    assert until(lambda: not heads.children.jobs(), PATIENCE)
    head.tick()
    assert head.errors() == ("fsdp2/checkpoint-4: /nowhere: no such file or directory",)
    assert any("hint=" in line.text for line in head.outcome.lines if line.is_error)
    head.tick()
    assert heads.children.jobs() == (), "it is not tried again at once"


def test_what_the_rules_let_go_of_is_marked_by_a_child(tmp_path: Path) -> None:
    config, store = configured(tmp_path, "retention: {runs: {fsdp2: {keep_last: 1}}}\n")
    make_two(tmp_path, store)
    heads = of_head(config, store, fail)
    assert [role.tick.name for role in heads.roles] == ["head", "retention", "verifier"]
    heads.roles[1].tick()
    assert until(lambda: list(tmp_path.glob("fsdp2/.ckptsync/checkpoint-4/tombstone-*")), PATIENCE)
    assert until(lambda: not heads.children.jobs(), PATIENCE)
    assert (heads.roles[1].errors(), list(tmp_path.glob("fsdp2/.ckptsync/checkpoint-5/tombstone-*"))) == ((), [])


def make_two(path: Path, store: Store) -> None:
    """Two verified checkpoints of one run."""
    make(path)
    copied = path.with_name(f"{path.name}-later")
    for node in ("node0", "node1"):
        shutil.copytree(DATA / "fsdp2" / node / "checkpoint-4", copied / node / "checkpoint-5")
        push_now(copied / node, store, node, "fsdp2")
    one(store, "fsdp2", "checkpoint-5", HeadOptions())
    verify(store, "fsdp2", "checkpoint-5", "digest", 0.0)


def test_what_one_role_reads_is_its_own_though_another_takes_it_at_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogues = Catalogues(configured(tmp_path / "store")[1])
    monkeypatch.setattr(kept, "save", lambda *_: catalogues.recent())  # as another thread does between reading and returning
    assert catalogues.read().summaries == ()
