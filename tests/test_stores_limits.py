from __future__ import annotations

from ckptsync.stores.limits import Limits, Unlimited


def test_unless_told_otherwise_nothing_waits_and_memory_is_bounded() -> None:
    limits = Limits()
    limits.pace.take(1 << 40)
    assert isinstance(limits.pace, Unlimited)
    assert limits.memory <= 128 << 20
    assert 0 < limits.stall < 120
