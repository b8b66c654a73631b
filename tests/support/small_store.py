"""A store that was really made: ``fsdp2`` is VERIFIED, of ``zero3`` one node's part has arrived."""

import shutil
import time
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import ckptsync
from ckptsync.head.consolidate import HeadOptions, consolidate_location
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.stores.opening import create_store, open_store
from ckptsync.verifier.verification import VerifyOptions
from tests.support.head_in_process import consolidate_due, verify_next
from tests.support.scheduled_verification import verify_scheduled
from tests.support.worker_in_process import push_now

DATA = Path(ckptsync.__file__).parent / "demo_data"
SHARD = "checkpoint-4/pytorch_model_fsdp_0/__0_0.distcp"


def make(path: Path) -> Path:
    """Copy the store, which is made once in a process, to ``path``; return that."""
    shutil.copytree(_made().name, path, dirs_exist_ok=True)
    return path


@cache
def _made() -> TemporaryDirectory[str]:
    directory = TemporaryDirectory(prefix="small-store-")
    store = create_store(directory.name)
    for run, node in (("fsdp2", "node0"), ("fsdp2", "node1"), ("zero3", "node0")):
        push_now(DATA / run / node, store, node, run)
    consolidate_due(store, HeadOptions(config_from={"*": str(DATA / "base")}))
    verify_next(store, VerifyPolicy(), time.time())
    return directory


def make_two(path: Path) -> Path:
    """Make it with a second checkpoint of ``fsdp2``, VERIFIED too, that has the same shards."""
    store = open_store(str(make(path)))
    copied = path.with_name(f"{path.name}-later")
    for node in ("node0", "node1"):
        shutil.copytree(DATA / "fsdp2" / node / "checkpoint-4", copied / node / "checkpoint-5")
        push_now(copied / node, store, node, "fsdp2")
    consolidate_location(store, "fsdp2", "checkpoint-5", HeadOptions())
    verify_scheduled(store, "fsdp2", "checkpoint-5", VerifyOptions("digest"))
    return path


def flip(path: Path) -> None:
    """Turn one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
