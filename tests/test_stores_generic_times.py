from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from ckptsync.stores.generic.times import changed

AT = 1_700_000_000.0  # 2023-11-14 22:13:20 UTC


@pytest.mark.parametrize(
    "info",
    [
        {"mtime": AT},
        {"created": AT},
        {"mtime": int(AT), "created": 5.0},
        {"LastModified": datetime.fromtimestamp(AT, timezone.utc)},
        {"last_modified": datetime.fromtimestamp(AT, timezone(timedelta(hours=3)))},
        {"modified": datetime(2023, 11, 14, 22, 13, 20)},  # noqa: DTZ001 - some say no zone, and mean UTC
        {"updated": "2023-11-14T22:13:20Z"},
        {"updated": "2023-11-14T22:13:20.000Z"},
        {"LastModified": "Tue, 14 Nov 2023 22:13:20 GMT"},
        {"modify": "20231114221320"},
        {"modify": "20231114221320.123"},
        {"modificationTime": AT * 1000},
    ],
)
def test_a_time_is_found_however_it_is_said(info: dict[str, object]) -> None:
    assert changed(info) == AT


@pytest.mark.parametrize(
    "info", [{}, {"mtime": None}, {"modified": "yesterday"}, {"modify": "99999999999999"}, {"modify": "\u00b2" * 14}]
)
def test_nothing_said_is_the_beginning_of_time(info: dict[str, object]) -> None:
    assert changed(info) == 0.0
