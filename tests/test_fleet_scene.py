"""How alarms speak."""

from ckptsync.fleet.scene import first, free_of, those


def test_of_many_lines_the_first_and_how_many_more() -> None:
    assert [first([]), first(["a"]), first(["a", "b", "c"])] == ["no reason is known", "a", "a (and 2 more)"]


def test_of_many_nodes_three() -> None:
    assert [those([]), those(["a", "b", "c"]), those(["a", "b", "c", "d"])] == ["its node", "a, b, c", "a, b, c and others"]


def test_what_is_free_is_said_of_all() -> None:
    assert free_of(10**9, 10**12) == "1 GB of 1 TB are free"
