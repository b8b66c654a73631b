from ckptsync.doctor.findings import SETUP, STORAGE, Finding, exit_code, in_order


def finding(level: str, kind: str, code: int = SETUP) -> Finding:
    return Finding(level, kind, ("n0",), "/data/out", "what", "why", "hint", code)  # type: ignore[arg-type]


def test_warnings_alone_are_no_failure() -> None:
    assert exit_code([]) == 0
    assert exit_code([finding("warn", "a", STORAGE)]) == 0


def test_the_greatest_code_of_a_failure_counts() -> None:
    assert exit_code([finding("fail", "a"), finding("warn", "b", STORAGE)]) == 2
    assert exit_code([finding("fail", "a", STORAGE), finding("fail", "b")]) == 4


def test_failures_come_first_and_each_once() -> None:
    given = [finding("warn", "a"), finding("fail", "b"), finding("warn", "a")]
    assert [(f.level, f.kind) for f in in_order(given)] == [("fail", "b"), ("warn", "a")]


def test_where_is_the_nodes_and_the_subject() -> None:
    assert finding("fail", "a").where == "n0: /data/out"
    assert Finding("fail", "a", (), "store", "", "", "").where == "store"
