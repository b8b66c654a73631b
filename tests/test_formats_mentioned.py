from __future__ import annotations

from ckptsync.formats.mentioned import Made, Name


def test_a_name_is_spelt_as_it_would_be_imported() -> None:
    assert str(Name("torch._utils", "_rebuild_tensor_v2")) == "torch._utils._rebuild_tensor_v2"


def test_two_calls_are_never_equal_so_that_they_are_keys_by_identity() -> None:
    one, other = Made(Name("m", "n"), ()), Made(Name("m", "n"), ())
    assert one != other
    assert len({one: 1, other: 2}) == 2
