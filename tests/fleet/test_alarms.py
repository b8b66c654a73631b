"""What an alarm is."""

from ckptsync.config.schema import KEYS
from ckptsync.fleet.alarms import CODES, KINDS
from tests.scenes import DAY, heart

HEAD = heart("boss", ("head", "verifier"), verifies=7 * DAY)


def test_every_kind_has_a_code_and_the_configuration_knows_all_of_them() -> None:
    assert set(CODES.values()) == set(KINDS)
    assert KEYS["alerts.on"].default == list(KINDS)
