"""A configuration, a store and output directories, as the service would find them."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from ckptsync.config.loading import read
from ckptsync.doctor import examining
from ckptsync.doctor.asking import Asked
from ckptsync.doctor.examining import Place
from ckptsync.stores.limits import Limits
from ckptsync.stores.posix.store import PosixStore
from tests.doctor_real import doctor, kinds, needs_namespaces

QWEN = '{"hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 10, "num_attention_heads": 2, "intermediate_size": 16, "tie_word_embeddings": true}'


def place(url: str, *, deletes: bool = True) -> Place:
    return Place(url, {}, Limits(), deletes)


def of_runs(*paths: Path | str, store: str = "/nowhere/store") -> list[tuple[str, str]]:
    text = f"store: {{url: {store}}}\nworker: {{runs: [{', '.join(f'{{path: {str(p)!r}}}' for p in paths)}]}}\n"
    return [(f.level, f.kind) for f in examining.runs(read(text, "x.yaml", {}), "n0")]


def test_runs_that_are_to_come_are_no_fault_and_those_that_cannot_are(tmp_path: Path) -> None:
    (tmp_path / "out/a").mkdir(parents=True)
    assert of_runs(tmp_path / "out/*", tmp_path / "soon") == []
    assert of_runs(tmp_path / "gone/*") == of_runs(tmp_path / "gone/out") == [("warn", "output-absent")]


def test_a_run_that_cannot_be_served_is_a_fault(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "out").mkdir(parents=True)
    assert of_runs(tmp_path / "one/out", tmp_path / "two/out") == [("fail", "run-left-out")]
    assert of_runs(tmp_path / "one/out", store=str(tmp_path)) == [("fail", "run-left-out")]


def test_a_sound_store_is_left_as_it_was_and_tells_the_time(tmp_path: Path) -> None:
    answer = examining.store(place(str(tmp_path)), "n0", [])
    assert answer.findings == ()
    assert answer.store is not None
    assert answer.clock == 0.0
    assert list(tmp_path.iterdir()) == []


def test_a_store_that_is_not_there_is_a_warning_unless_it_was_served_before(tmp_path: Path) -> None:
    assert examining.store(place(str(tmp_path / "soon")), "n0", []) == examining.Answer(())
    url = str(tmp_path / "gone/store")
    out = tmp_path / "out"
    (out / "_ckptsync").mkdir(parents=True)
    assert [(f.level, f.kind) for f in examining.store(place(url), "n0", [out]).findings] == [("warn", "store-absent")]
    assert not Path(url).exists()
    (out / "_ckptsync/store").write_text(f"{url}\n")
    assert [(f.level, f.kind) for f in examining.store(place(url), "n0", [out]).findings] == [("fail", "store-absent")]


@pytest.mark.parametrize(
    ("url", "kind"),
    [("s3://", "store-unreachable"), ("sftp://127.0.0.1:1/x", "store-unreachable"), ("s3://user:pw@b", "store-unreachable")],
)
def test_a_store_that_cannot_be_reached_is_a_failure_and_no_secret_is_told(url: str, kind: str) -> None:
    (one,) = examining.store(place(url), "n0", []).findings
    assert (one.level, one.kind) == ("fail", kind)
    assert "pw" not in one.what + one.why + one.hint


def test_a_groups_store_with_a_umask_that_shuts_the_group_out_is_found(tmp_path: Path) -> None:
    tmp_path.chmod(0o2775)
    before = os.umask(0o077)
    try:
        assert [f.kind for f in examining.store(place(str(tmp_path)), "n0", []).findings] == ["umask"]
        os.umask(0o002)
        assert examining.store(place(str(tmp_path)), "n0", []).findings == ()
    finally:
        os.umask(before)


def test_the_room_of_an_output_directory_that_is_to_come_is_that_above_it(tmp_path: Path) -> None:
    asked = Asked("n0", os.geteuid(), expected=1 << 60)
    assert [f.kind for f in examining.outputs([tmp_path / "soon/out"], asked)] == ["disk-full"]


def test_a_checkpoint_is_expected_to_hold_all_where_all_is_trained(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(QWEN)
    whole = examining.expected(str(tmp_path), {})
    assert whole == (80 + 4 * 64 + 3 * 128) * 14
    assert examining.expected(str(tmp_path), {"model_name_or_path": "x", "finetuning_type": "full"}) == whole
    assert examining.expected(str(tmp_path), {"model_name_or_path": "x"}) == 0, "LLaMA-Factory trains an adapter unless it is told"
    assert examining.expected("", {}) == examining.expected(str(tmp_path / "none"), {}) == 0


def test_how_a_stores_own_file_system_is_mounted_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mountinfo").write_text("40 22 0:40 / / rw - nfs4 head:/srv rw,vers=4.2,soft\n")
    (tmp_path / "store").mkdir()
    monkeypatch.setattr("ckptsync.stores.mounts.TABLE", str(tmp_path / "mountinfo"))
    assert [f.kind for f in examining.store(place(str(tmp_path / "store")), "n0", []).findings] == ["nfs-soft"]
    assert {f.kind for f in examining.outputs([tmp_path], Asked("n0", os.geteuid()))} == {"nfs-soft", "no-events"}


@needs_namespaces
def test_inotifys_limits_are_looked_at(tmp_path: Path) -> None:
    setup = "echo 0 > /proc/sys/user/max_inotify_instances"
    assert "inotify" in kinds(doctor(["--output-dir", tmp_path, "--python", sys.executable], setup))


def test_a_clock_that_is_days_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = time.time
    monkeypatch.setattr("ckptsync.worker.clock.time.time", lambda: real() - 2 * 86400)
    assert examining.clock(PosixStore(str(tmp_path)), "n0") == pytest.approx(-2 * 86400, abs=2)


def test_of_a_url_with_a_password_no_more_than_the_scheme_is_shown(tmp_path: Path) -> None:
    (one,) = examining.store(place("s3://user:s3cret@b"), "n0", []).findings
    assert "s3cret" not in repr(one)
    assert one.subject == "s3://…"
    assert examining.shown(str(tmp_path)) == str(tmp_path)
    assert examining.shown("sftp://me@host/dir") == "sftp://me@host/dir"


def test_a_store_that_says_nothing_is_not_waited_for_as_long_as_an_upload_is() -> None:
    hasty = examining._hasty(place("x"))
    assert hasty.stall < Limits().stall
    assert 0 < hasty.patience < 5, "S3 tells its region by a refusal, and is asked again"


@needs_namespaces
def test_a_store_in_which_somebody_else_made_our_own_directory_and_no_run_may_be_made_is_found(tmp_path: Path) -> None:
    (tmp_path / ".ckptsync").mkdir()
    words = ["--publish", tmp_path, "--python", sys.executable]
    user = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    assert "store-create" not in kinds(doctor(words, within=user))
    tmp_path.chmod(0o555)
    told = doctor(words, within=user)
    tmp_path.chmod(0o755)
    assert [f["exit_code"] for f in told["findings"] if f["kind"] == "store-create"] == [4]
