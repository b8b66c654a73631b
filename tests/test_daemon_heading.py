"""The roles of the head: real child processes over a real store."""

from pathlib import Path

import ckptsync
from ckptsync.catalogue.fresh import fresh
from ckptsync.config.loading import read
from ckptsync.config.values import Config
from ckptsync.daemon.heading import Heads, of_head
from ckptsync.stores.contract import Store
from ckptsync.stores.opening import create_store
from ckptsync.worker.push import push_now
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
    return [snapshot.word for snapshot in fresh(store).readable]


def works(heads: Heads, store: Store, wanted: list[str]) -> bool:
    """Whether this comes to be, when every tick runs as often as its hints ask for."""
    asked = [1]
    for role in heads.roles:
        role.tick.soon = lambda _: asked.append(1)

    def is_so() -> bool:
        if asked and not heads.children.orders():
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
    head.tick()
    assert head.errors() == ("fsdp2/checkpoint-4: /nowhere: no such file or directory",)
    assert any("hint=" in line.text for line in head.outcome.lines if line.is_error)
    head.tick()
    assert heads.children.orders() == (), "it is not tried again at once"
