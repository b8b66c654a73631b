"""Trainer, hook, rotation and worker in any order, on a real directory: no save that the hook
committed is lost, and none is seen torn.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from ckptsync.spool.pins import clean_own, compare, drop, list_pins, mark_stored
from ckptsync.worker.local_save import LocalSave
from ckptsync.worker.options import RunDir
from ckptsync.worker.pinning import Pinner
from ckptsync.worker.scanner import list_and_pin_saves
from tests.support.hook_pins import commit

FILES = ("config.json", "model", "rng_0", "rng_1", "state")
Content = dict[str, bytes]


class World:
    """One checkpoint's name, saved again and again.

    ``owed``: by their save ids, the committed saves that no store has yet.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.source = out, out / "checkpoint-4"
        self.pinner = Pinner("n0", lambda *_: False)
        self.saves, self.written = 0, 0
        self.is_committed = True
        self.owed: dict[str, Content] = {}
        self.local_save: tuple[LocalSave, ...] = ()

    def begin(self) -> None:
        """The trainer removes a checkpoint, and saves it again."""
        if self.is_committed:
            shutil.rmtree(self.source, ignore_errors=True)
            self.saves, self.written, self.is_committed = self.saves + 1, 0, False

    def begin_in_location(self) -> None:
        """The same over the files that are there, by new files under the old names, as safetensors
        does.
        """
        if self.is_committed and self.saves:
            self.saves, self.written, self.is_committed = self.saves + 1, 0, False

    def write(self) -> None:
        if not self.is_committed and self.written < len(FILES):
            self.put(FILES[self.written])
            self.written += 1

    def write_the_rest(self) -> None:
        for _ in FILES:
            self.write()

    def placeholder(self) -> None:
        """ZeRO-3 writes the weights' name, and takes it back."""
        if not self.is_committed and 0 < self.written < len(FILES):
            name = "placeholder"
            (self.source / name).unlink() if (self.source / name).exists() else self.put(name)

    def callback(self) -> None:
        """Somebody's callback writes the model again, within the event."""
        if not self.is_committed and self.written == len(FILES):
            self.put("model", b" by a callback")

    def commit(self) -> None:
        if not self.is_committed and self.written == len(FILES):
            (self.source / "placeholder").unlink(missing_ok=True)
            commit(self.source, f"save-{self.saves}")
            self.owed[f"save-{self.saves}"] = {
                p.name: p.read_bytes() for p in self.source.iterdir()
            }
            self.is_committed = True

    def rotate(self) -> None:
        """One file after another goes, only of what was committed."""
        if self.is_committed and self.source.exists():
            for path in sorted(self.source.iterdir())[:2]:
                path.unlink()

    def look(self) -> None:
        before = self.times()
        scan = list_and_pin_saves(RunDir("run", self.out), self.pinner)
        assert scan.failures == ()
        assert self.times() == before
        self.local_save = scan.saves
        self.check()

    def restart(self) -> None:
        clean_own(self.out, "n0")
        self.pinner = Pinner("n0", lambda *_: False)

    def send(self) -> None:
        """The oldest committed save reaches the store, and its pin goes."""
        for one in self.local_save:
            if one.pin and one.pin.is_committed and one.pin.path.exists():
                mark_stored(one.pin)
                drop(one.pin)
                assert one.pin.commit
                self.owed.pop(one.pin.commit.save)
                # a later save's pin may have the same path before the next look
                self.local_save = tuple(other for other in self.local_save if other is not one)
                return

    def put(self, name: str, more: bytes = b"") -> None:
        self.source.mkdir(exist_ok=True)
        fresh = self.out / "fresh"
        fresh.write_bytes(f"{self.saves} {name}".encode() + more)
        fresh.replace(self.source / name)

    def times(self) -> object:
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_ino)
            for path in [*sorted(self.source.rglob("*")), self.source]
            if path.exists()
        }

    def check(self) -> None:
        committed = {
            s.pin.commit.save: s
            for s in self.local_save
            if s.pin and s.pin.commit and s.pin.is_committed
        }
        assert committed.keys() >= self.owed.keys()
        for save, content in self.owed.items():
            one = committed[save]
            assert one.pin
            assert one.pin.node == "n0"
            assert {name: (one.pin.root / name).read_bytes() for name in content} == content
        everything = list_pins(self.out)
        for whole in (p for p in everything if p.is_committed):
            assert not [
                p
                for p in everything
                if p.k < whole.k and not p.is_committed and compare(p.files, whole.files).same
            ]
        if self.source.exists() and any(self.source.iterdir()):
            assert {p.name for p in self.source.iterdir()} <= set(self.local_save[-1].files.by_path)


ACTIONS: tuple[Callable[[World], None], ...] = (
    World.begin,
    World.begin_in_location,
    World.write,
    World.write_the_rest,
    World.placeholder,
    World.callback,
    World.commit,
    World.rotate,
    World.look,
    World.restart,
    World.send,
)


@example([World.look, World.commit, World.rotate, World.look, World.send])
@given(st.lists(st.sampled_from(ACTIONS), max_size=40))
def test_no_committed_save_is_lost_or_torn(actions: list[Callable[[World], None]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder))
        for action in (World.begin, World.write_the_rest, *actions, World.look):
            action(world)
