"""From a path or URL to what is verified."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ckptsync.digest import digest
from ckptsync.errors import ConfigError, StoreError, Unsupported
from ckptsync.head.due_jobs import VerifyPolicy
from ckptsync.records.io import encode
from ckptsync.records.report import Report, VerifyFinding
from ckptsync.records.store_paths import file_name
from ckptsync.safe_names import STORE_FILE
from ckptsync.stores.contract import read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.posix.store import PosixStore
from ckptsync.verifier.level_digest import Sample
from ckptsync.verifier.verification import (
    InStore,
    PlainDirectory,
    VerifyOptions,
    resolve_target,
    verify,
)
from ckptsync.verifier.write_reports import write_report
from tests.support.files_in_memory import MemoryFiles
from tests.support.filled_stores import flip
from tests.support.head_in_process import verify_next
from tests.support.scheduled_verification import verify_scheduled
from tests.support.verified_stores import (
    LOCATION,
    RUN,
    WHOLE,
    arrive,
    damage,
    location,
    manifest,
    model_record,
    verified,
    whole_store,
)


@pytest.fixture
def store(tmp_path: Path) -> PosixStore:
    found = PosixStore(str(tmp_path))
    found.write(STORE_FILE, [b'{"format":1}'])
    model_record(found, MemoryFiles(WHOLE), [arrive(found, WHOLE)])
    return found


def asked(path: str) -> list[Report]:
    return [one.report for one in verify(resolve_target(path), VerifyOptions("parse"))]


@pytest.mark.parametrize(
    ("below", "run", "location"),
    [
        ("", "", ""),
        ("run", RUN, ""),
        ("run/checkpoint-4", RUN, LOCATION),
        ("run/checkpoint-4/model.safetensors", RUN, LOCATION),
        ("run/consolidated/checkpoint-4", RUN, LOCATION),
        ("run/consolidated", RUN, ""),
        ("run/.ckptsync/checkpoint-4", RUN, LOCATION),
    ],
)
def test_a_directory_of_a_store_finds_its_location(
    store: PosixStore, below: str, run: str, location: str
) -> None:
    found = resolve_target(f"{store.root}/{below}")
    assert isinstance(found, InStore)
    assert (found.store.url, found.run, found.location) == (store.root, run, location)
    assert [
        (one.report.location, one.report.verdict) for one in verify(found, VerifyOptions("parse"))
    ] == [(LOCATION, "ok")]


def test_how_much_will_be_read_is_told_beforehand(store: PosixStore) -> None:
    size = sum(location(store).sizes.values())
    told: list[int] = []
    for options in (
        VerifyOptions("stat", expect=told.append),
        VerifyOptions("digest", expect=told.append),
        VerifyOptions("digest", sample=Sample(0.5), expect=told.append),
    ):
        assert [*verify(InStore(store), options)]
    assert told == [0, size, size // 2]


def test_a_consolidated_model_alone_is_verified_against_its_model_record(store: PosixStore) -> None:
    flip(store, f"{RUN}/consolidated/{LOCATION}/config.json", 3)
    (report,) = asked(f"{store.root}/run/consolidated/checkpoint-4")
    assert ("digest", "consolidated/checkpoint-4/config.json") in damage(report)


def test_a_checkpoint_whose_directory_is_gone_is_still_known(store: PosixStore) -> None:
    for name in WHOLE:
        store.delete(f"{RUN}/{LOCATION}/{name}")
    (report,) = asked(f"{store.root}/run/checkpoint-4")
    assert [kind for kind, _ in damage(report)] == ["missing", "missing"]


def test_what_no_node_has_told_of_is_an_error(store: PosixStore) -> None:
    for below in ("other", "run/checkpoint-5"):
        with pytest.raises(ConfigError, match="not found"):
            asked(f"{store.root}/{below}")


def test_any_other_directory_is_plain(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WHOLE["model.safetensors"])
    assert resolve_target(str(tmp_path)) == PlainDirectory(tmp_path)
    (report,) = asked(str(tmp_path))
    assert (report.run, report.verdict) == ("", "ok")
    with pytest.raises(ConfigError):
        asked(str(tmp_path / "nowhere"))


def test_a_location_with_only_a_damaged_manifest_is_damage(store: PosixStore) -> None:
    flip(store, next(e.name for e in store.names("") if "/manifest-" in e.name), 30)
    (report,) = asked(store.root)
    assert report.verdict == "damaged"
    assert ("digest" in {kind for kind, _ in damage(report)}) is True


def test_a_newer_record_is_refused_after_the_others_were_verified(store: PosixStore) -> None:
    data = json.dumps({**json.loads(encode(manifest(WHOLE))), "format": 99}).encode()
    store.write(f"{RUN}/.ckptsync/checkpoint-9/manifest-n0-0-{digest(data)[:16]}.json", [data])
    reports = verify(resolve_target(store.root), VerifyOptions("stat"))
    assert next(reports).report.location == LOCATION
    with pytest.raises(Unsupported, match="format 99"):
        next(reports)


def test_a_location_of_which_every_manifest_is_gone_is_damage_and_not_forgotten(
    store: PosixStore,
) -> None:
    assert [r.verdict for r in asked(store.root)] == ["ok"]
    (name,) = [e.name for e in store.names("") if "/manifest-" in e.name]
    data = read_all(store, name)
    store.delete(name)
    (report,) = asked(store.root)
    assert report.verdict == "damaged"
    assert damage(report) == [("missing", name.removeprefix(f"{RUN}/"))]
    store.write(name, [data])
    assert [r.verdict for r in asked(store.root)] == ["ok"]


def test_a_location_of_which_one_manifest_is_gone_is_damage_and_what_is_there_is_read(
    store: PosixStore,
) -> None:
    extra = arrive(store, {"rng_state_1.pth": b"state"}, "n1")
    write_report(store, verified(store))
    store.delete(extra)
    (report,) = asked(store.root)
    assert damage(report) == [("missing", extra.removeprefix(f"{RUN}/"))]
    assert report.read


def test_a_sample_keeps_what_stands_against_the_files_that_it_left_out(store: PosixStore) -> None:
    for name in ("model.safetensors", "config.json"):
        flip(store, f"{RUN}/{LOCATION}/{name}", 3)
    write_report(store, verified(store))
    store.write(f"{RUN}/{LOCATION}/config.json", [WHOLE["config.json"]])
    seen: dict[frozenset[str], set[str] | None] = {}
    for seed in range(20):
        (one,) = verify(
            resolve_target(store.root), VerifyOptions("digest", sample=Sample(0.01, seed))
        )
        if one.report.verdict == "damaged":
            found = {f.name for f in one.report.findings if f.kind == "digest"}
            seen[frozenset(found)] = (
                {f.name for f in one.news.findings if f.kind == "digest"} if one.news else None
            )
    assert frozenset({f"{LOCATION}/model.safetensors"}) in seen
    assert all(news is None or f"{LOCATION}/config.json" in news for news in seen.values())


# --- as the schedule asks

MODEL = file_name(RUN, LOCATION, "model.safetensors")
DAILY = VerifyPolicy("digest", 86400.0)


def reports(store: MemoryStore) -> list[Report]:
    return sorted(location(store).records.reports.values(), key=lambda r: r.n)


def test_an_incomplete_location_gets_no_reports_but_for_damage() -> None:
    store = MemoryStore()
    path = "model-00001-of-00002.safetensors"
    arrive(store, {path: WHOLE["model.safetensors"]})
    assert verify_next(store, DAILY, 1e6) is None
    store.delete(file_name(RUN, LOCATION, path))
    assert verify_next(store, DAILY, 1e6)
    store.write(file_name(RUN, LOCATION, path), [WHOLE["model.safetensors"]])
    assert verify_next(store, DAILY, 1e6)
    assert [r.verdict for r in reports(store)] == ["damaged", "incomplete"]
    assert location(store).status == "INCOMPLETE"
    assert verify_next(store, DAILY, 1e6) is None


class Failing(MemoryStore):
    fails = False

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        if self.fails and name == MODEL:
            raise StoreError(f"{name}: input/output error")
        super().read_into(name, start, out)


def test_a_store_that_does_not_answer_is_an_error_and_no_report() -> None:
    store = Failing()
    arrive(store, WHOLE)
    store.fails = True
    with pytest.raises(StoreError):
        verify_next(store, DAILY, 1e6)
    store.fails = False
    assert reports(store) == []


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_damage_that_another_finds_while_a_verification_reads_is_not_answered_by_it(
    *, is_scheduled: bool
) -> None:
    store = whole_store()

    def harm(_: int) -> None:
        if location(store).status != "DAMAGED":
            wrong = VerifyFinding("digest", f"{LOCATION}/model.safetensors", "")
            write_report(store, replace(verified(store), verdict="damaged", findings=(wrong,)))

    for options in (VerifyOptions("digest", 1.0, progress=harm), VerifyOptions("digest", 2.0)):
        if is_scheduled:
            found = verify_scheduled(store, RUN, LOCATION, options)
            assert found is not None
            assert found[0].verdict == "ok"
        else:
            (one,) = verify(InStore(store), options)
            assert one.news is not None
            assert one.news.verdict == "ok"
            write_report(store, one.news)
        assert location(store).status == ("DAMAGED" if options.now == 1.0 else "VERIFIED")
