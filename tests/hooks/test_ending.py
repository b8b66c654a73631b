from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ckptsync import scan
from ckptsync.hooks import ending
from ckptsync.service.process import Locks
from ckptsync.spool import marks
from ckptsync.spool.marks import Commit
from tests.hooks.training import Said
from tests.standing import ROOT, ran

NAMES = (
    *(
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "adapter_model.safetensors",
        "adapter_model.bin",
    ),
    *(
        "config.json",
        "vocab.txt",
        "merges.txt",
        "README.md",
        "train.log",
        "trainer_log.jsonl",
        ".hidden.json",
        "chat_template.jinja",
    ),
    *("model.bin", "notes.txt", ".tmpabcdef", "tokenizer.model", "training_args.bin", "modeling_x.py", "events.out"),
    *("source.spm", "bpe.codes", "dict.txt", "prophetnet.tokenizer"),
)


def pinned(output_dir: Path, train: str, checkpoint: str, *, stored: bool = False) -> Path:
    pin = output_dir / "_ckptsync" / "pins" / f"{checkpoint}.0"
    (pin / "files").mkdir(parents=True)
    marks.write_mark(pin / "commit.json", Commit(train, "s", checkpoint, 1, 1, (0,), "h", "", 1.0, {}))
    if stored:
        (pin / "stored").touch()
    return pin


def test_the_final_model_is_what_the_worker_takes_it_to_be(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).write_text(name)
    (tmp_path / "checkpoint-1").mkdir()
    (final,) = (s for s in scan.spots(tmp_path) if s.name == scan.FINAL)
    assert [f.path for f in ending.final_model(tmp_path).files] == [f.path for f in scan.found(final).files]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_what_the_worker_takes_them_to_be(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(name)
    assert bool(ending.weights(tmp_path)) == any(s.name == scan.FINAL for s in scan.spots(tmp_path))


def test_weights_that_are_written_again_are_others(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("1")
    before = ending.weights(tmp_path)
    assert ending.weights(tmp_path) == before
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    assert ending.weights(tmp_path) != before
    assert ending.weights(tmp_path / "nowhere") == frozenset()


@pytest.mark.parametrize(("script", "failed"), [("", False), ("raise ValueError", True), ("import sys; sys.exit(3)", False)])
def test_an_exception_that_nobody_caught_is_seen_at_the_end(script: str, failed: bool) -> None:  # noqa: FBT001
    program = f"import atexit\nfrom ckptsync.hooks import ending\natexit.register(lambda: print(ending.has_failed()))\n{script}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=Path(__file__).parent.parent.parent
    )
    assert done.stdout.strip() == str(failed)


def test_a_worker_at_work_is_seen_and_not_disturbed(spool: Path) -> None:
    locks = Locks("n0")
    assert not ending.is_served(spool)
    locks.hold(spool)
    assert ending.is_served(spool)
    locks.close()
    assert not ending.is_served(spool)
    locks.hold(spool)
    locks.close()


def test_only_this_training_s_saves_are_waited_for(tmp_path: Path) -> None:
    pinned(tmp_path, "other", "checkpoint-1")
    pinned(tmp_path, "mine", "checkpoint-2", stored=True)
    assert ending.unstored(tmp_path, {"mine"}) == ()
    pinned(tmp_path, "mine", "checkpoint-3")
    assert ending.unstored(tmp_path, {"mine", "other"}) != ending.unstored(tmp_path, {"mine"})
    assert ending.unstored(tmp_path, {"mine"}) == ("checkpoint-3.0",)


def test_waiting_ends_when_the_store_has_everything(tmp_path: Path) -> None:
    pin, said, locks = pinned(tmp_path, "mine", "checkpoint-1"), Said(), Locks("n0")
    locks.hold(tmp_path / "_ckptsync")
    left: list[tuple[str, ...]] = []
    thread = threading.Thread(target=lambda: left.append(ending.wait(tmp_path, {"mine"}, 60, said)))
    thread.start()
    (pin / "stored").touch()
    thread.join(30)
    locks.close()
    assert (left, said) == ([()], [])


def test_waiting_has_an_end(tmp_path: Path) -> None:
    said, locks = Said(), Locks("n0")
    pinned(tmp_path, "mine", "checkpoint-1")
    locks.hold(tmp_path / "_ckptsync")
    assert ending.wait(tmp_path, {"mine"}, 0, said) == ("checkpoint-1.0",)
    locks.close()
    assert "has not got checkpoint-1.0" in said[0]


def test_a_worker_that_begins_again_is_waited_for(tmp_path: Path) -> None:
    pin, said, locks = pinned(tmp_path, "mine", "checkpoint-1"), Said(), Locks("n0")

    def served(spool: Path) -> bool:
        if ending.is_served(spool):
            (pin / "stored").touch()
            return True
        locks.hold(spool)  # at the second look it is back
        return False

    assert ending.wait(tmp_path, {"mine"}, 3600, said, served=served, restart=60) == ()
    locks.close()
    assert said == []


def test_where_no_worker_is_nobody_waits(tmp_path: Path) -> None:
    said = Said()
    pinned(tmp_path, "mine", "checkpoint-1")
    assert ending.wait(tmp_path, {"mine"}, 3600, said, restart=0) == ("checkpoint-1.0",)
    assert "no worker" in said[0]


def test_several_that_wait_one_after_the_other_wait_as_long_as_one(tmp_path: Path) -> None:
    said, locks = Said(), Locks("n0")
    pinned(tmp_path, "mine", "checkpoint-1")
    locks.hold(tmp_path / "_ckptsync")
    assert ending.end_began() == ending.end_began()
    assert ending.wait(tmp_path, {"mine"}, 3600, said, since=ending.end_began() - 3600) == ("checkpoint-1.0",)
    locks.close()
    assert ending.wait(tmp_path, {"mine"}, 3600, said, since=ending.end_began() - ending.RESTART) == ("checkpoint-1.0",)
    assert [line.partition(":")[0] for line in said] == ["waited 3600 s", "not waiting"]


FORKED = """
import multiprocessing, sys
from ckptsync.hooks import ending
def work(how):
    ending.at_end(lambda: print("never", flush=True))()
    ending.at_end(lambda: print(how, ending.has_failed(), flush=True))
    if how == "raises":
        raise ValueError
    sys.exit(how == "exits with 1")
if __name__ == "__main__":
    for how in ("ends", "exits with 1", "raises"):
        process = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(how,))
        process.start()
        process.join()
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_process_of_multiprocessing_has_an_end_too(tmp_path: Path, way: str) -> None:
    """Those of `notebook_launcher` and of torch's `spawn`."""
    (tmp_path / "forked.py").write_text(FORKED)
    done = ran(str(tmp_path / "forked.py"), way, cwd=ROOT)
    assert done.stdout.splitlines() == ["ends False", "exits with 1 True", "raises True"]
