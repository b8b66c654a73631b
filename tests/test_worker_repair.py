"""Which reports ask a node for what."""

from __future__ import annotations

from dataclasses import replace

from ckptsync.digest import digest
from ckptsync.model import Demands
from ckptsync.records.manifest import FileEntry, Manifest
from ckptsync.records.report import Finding, Kind, Level, Report, Verdict
from ckptsync.records.saves import Known
from ckptsync.records.state import Records
from ckptsync.stores.memory import MemoryStore
from ckptsync.worker.repair import serve, wanted
from ckptsync.worker.upload import Destination


def manifest(node: str, content: str) -> Known:
    entry = FileEntry("x", len(content), digest(content.encode()), 1 << 14, (), 0)
    return Known(f"manifest-{node}", Manifest("run", "c-1", "c-1", node, 0, (entry,), (), 0, 0, Demands()))


def report(n: int, verdict: Verdict = "damaged", name: str = "c-1/x", kind: Kind = "digest", level: Level = "digest") -> Report:
    findings = () if verdict == "ok" else (Finding(kind, name, ""),)
    return Report("run", "c-1", "c-1", n, level, verdict, (), "", 0, findings)


def asked(*reports: Report, node: str = "n0", known: tuple[Known, ...] = (manifest("n0", "a"),)) -> list[tuple[str, str]]:
    records = Records(reports={f"report-{r.n}": r for r in reports})
    return [(r.report, r.name) for r in wanted(records, node, "c-1", known)]


def test_the_newest_unanswered_report_asks() -> None:
    assert asked(report(0)) == [("report-0", "run/c-1/x")]
    assert asked(report(0), report(1)) == [("report-1", "run/c-1/x")]
    assert asked(report(0), report(1, "ok")) == []
    assert asked(report(0), report(1, "ok", level="stat")) == [("report-0", "run/c-1/x")]


def test_only_files_that_this_node_has_named_and_that_are_damaged_are_asked_for() -> None:
    assert asked(report(0), node="n1") == []
    for name in ("x", "../c-1/x", "c-1/y", "consolidated/c-1/x", ".ckptsync/c-1/files/n0/x"):
        assert asked(report(0, name=name)) == []
    assert asked(report(0, kind="nonfinite")) == []
    assert asked(report(0), known=()) == []


def test_each_of_two_nodes_is_asked_for_its_own_copy_and_both_for_a_shared_one() -> None:
    beside = ".ckptsync/c-1/files/n1/x"
    other = manifest("n1", "b")
    lying = replace(other.manifest, files=(replace(other.manifest.files[0], stored_as=f"run/{beside}"),))
    two = (manifest("n0", "a"), replace(other, manifest=lying))
    assert asked(report(0), known=(manifest("n0", "a"), other)) == [], "the name may have the other's bytes"
    assert asked(report(0, name=beside), node="n1", known=two) == [("report-0", f"run/{beside}")]
    assert asked(report(0, name=beside), node="n0", known=two) == []
    assert asked(report(0), node="n1", known=two) == []
    assert asked(report(0), node="n1", known=(manifest("n0", "a"), manifest("n1", "a"))) == [("report-0", "run/c-1/x")]


def test_what_was_broken_before_it_was_taken_is_not_sent_again() -> None:
    records = Records(reports={"r": report(0, kind="parse")})
    (request,) = wanted(records, "n0", "c-1", [manifest("n0", "a")])
    store = MemoryStore()
    store.write("run/c-1/x", [b"a"])
    assert "damaged before" in serve(request, [], Destination(store, "n0", tuple))
    store.write("run/c-1/x", [b"b"])
    assert "no longer" in serve(request, [], Destination(store, "n0", tuple))
