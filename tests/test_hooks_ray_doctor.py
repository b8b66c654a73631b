from __future__ import annotations

from typing import Any

from ckptsync.doctor import probe
from ckptsync.hooks.ray_doctor import examine


def node(name: str, **more: Any) -> dict[str, Any]:
    return {"node": name, "host": name, "machine": name, "boot": name, "python": "3.11.2", "versions": {"torch": "2.13.0"}, **more}


def test_workers_that_fit_together_are_let_train() -> None:
    assert examine([node("a"), node("a"), node("b")]).failures == ()


def test_a_difference_between_nodes_is_told_with_both_and_what_to_do() -> None:
    (text,) = examine([node("a"), node("b", versions={"torch": "2.6.0"})]).failures
    assert "a, b" in text
    assert "2.6.0" in text
    assert ";" in text


def test_a_worker_that_could_not_tell_is_a_warning() -> None:
    found = examine([node("a"), {"error": "OSError: no such file"}])
    assert found.failures == ()
    assert "OSError: no such file" in found.warnings[-1]


def test_this_machine_fits_to_itself() -> None:
    here = probe.gather()
    assert examine([here, here]).failures == ()
