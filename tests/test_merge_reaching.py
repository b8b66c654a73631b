"""What a task reaches on another machine: the same files, or it is told that they are not; and a place to write to."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ckptsync.errors import ConfigError, Incomplete
from ckptsync.merge.looking import Asked, Prepared, look
from ckptsync.merge.plan import Options
from ckptsync.merge.reaching import reach
from ckptsync.stores.limits import Limits, TokenBucket, parse_schedule
from ckptsync.stores.opening import bare
from ckptsync.stores.trees import Access
from ckptsync.stores.urls import located
from tests.consolidated import FILES
from tests.weed import weed


def prepared(tmp_path: Path, destination: str = "", access: Access | None = None) -> Prepared:
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    for name, data in FILES.items():
        (source / name).write_bytes(data)
    return look(Asked([source], located(destination or str(tmp_path / "out")), Options()), access or Access())


def test_a_task_opens_what_was_planned_from_and_writes_where_it_was_told(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    handed = pickle.loads(pickle.dumps(reach(prepared(tmp_path), Access(), tmp_path / "work")))
    assert set(handed.files().sizes()) == set(FILES)
    handed.write()("a", [b"12", b"3"])
    assert (tmp_path / "work/a").read_bytes() == b"123"


def test_other_files_under_the_same_path_are_refused(tmp_path: Path) -> None:
    made = reach(prepared(tmp_path), Access(), tmp_path)
    (tmp_path / "source/model.safetensors").write_bytes(FILES["model.safetensors"] + b" ")
    with pytest.raises(Incomplete, match="not as it was planned from"):
        made.files()


def test_a_directory_of_another_machine_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not on this node"):
        reach(prepared(tmp_path), Access(), tmp_path / "elsewhere").write()


def test_a_bucket_is_reached_with_the_same_options_and_no_pace(tmp_path: Path) -> None:
    url = f"s3://{weed().bucket()}/out"
    access = Access(weed().options(), Limits(TokenBucket(parse_schedule("100MB/s"))))
    handed = pickle.loads(pickle.dumps(reach(prepared(tmp_path, url, access), access)))
    handed.write()("a", [b"123"])
    assert bare(url, weed().options()).size("a") == 3
    with pytest.raises(Incomplete, match="were announced"):  # of files of weights more is known
        handed.write()("model.safetensors", [b"123"])
