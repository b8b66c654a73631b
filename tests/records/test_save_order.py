"""No one wrong clock makes a save the newest, or the oldest; a training that begins again does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptsync.records.save_order import SaveDates, contradictions, oldest_first

DAY = 86400.0


def save(line: str) -> tuple[str, SaveDates]:
    """``500@10>12``: step 500, its files dated 10, in the store at 12; ``!`` if dated later."""
    name, _, times = line.partition("@")
    written, _, arrived = times.rstrip("!").partition(">")
    checkpoint = f"checkpoint-{name.rstrip('b')}" if name.rstrip("b").isdigit() else name
    dates = SaveDates(checkpoint, float(written), float(arrived), times.endswith("!"))
    return name, dates


def ordered(text: str) -> list[str]:
    saves = [save(line) for line in text.split()]
    found = [name for name, _ in oldest_first(saves, lambda s: s[1])]
    assert found == [name for name, _ in oldest_first(saves[::-1], lambda s: s[1])]
    return found


@pytest.mark.parametrize(
    ("saves", "expected"),
    [
        pytest.param("1@1>2 2@3>4 3@5>6", "1 2 3", id="all is right"),
        pytest.param("1@1>2 2@4>4! 3@5>6 4@7>8", "1 2 3 4", id="ahead"),
        pytest.param("1@1>2 2@3>4 3@-99>6", "1 2 3", id="the newest is dated in the past"),
        pytest.param("1@1>2 2@-99>4 3@5>6", "1 2 3", id="in the past"),
        pytest.param("1@1>10 2@11>11! 3@3>12 4@4>13", "1 2 3 4", id="ahead, sent together"),
        pytest.param("4@4>10 3@3>11 2@12>12! 1@1>13", "1 2 3 4", id="ahead, the newest sent first"),
        pytest.param("4@-9>10 3@3>11 2@2>12 1@1>13", "1 2 3 4", id="past, the newest sent first"),
        pytest.param("1@1>9 2@2>9 4@3>9 3@-9>9", "1 2 3 4", id="past, copied in one moment"),
        pytest.param(
            "1@10>10 2@20>20 5@5>30 3@15>31 4@16>32", "1 2 3 4 5", id="past, the newest sent before"
        ),
        pytest.param("7@2>2! 8@4>4! 9@6>6!", "7 8 9", id="a clock that is always ahead"),
        pytest.param("1@1>2 2@3>4 3@-9>6 4@-8>7 5@8>9", "1 2 3 4 5", id="past for a while"),
        pytest.param("900@1>2 100@3>4", "900 100", id="begun again"),
        pytest.param("900@1>2 100@3>4 200@5>6", "900 100 200", id="begun again, two saves"),
        pytest.param("900@1>2 100@3>4 200@-9>6", "900 100 200", id="begun again, then the past"),
        pytest.param("900@1>2 100@3>4 200@6>6!", "900 100 200", id="begun again, then ahead"),
        pytest.param("900@-9>2 100@3>4", "900 100", id="begun again after the past"),
        pytest.param("9@1>2 5@3>4 9b@5>6 10@7>8", "9 5 9b 10", id="resumed from an earlier step"),
        pytest.param("9@1>2 9b@3>4", "9 9b", id="two saves of one name"),
        pytest.param("8@1>50 9@2>51 1@3>52 2@4>53", "8 9 1 2", id="begun again, store away"),
        pytest.param("9@2>51 1@3>52 2@4>53", "9 1 2", id="begun again, store away, one left"),
        pytest.param("1@1>4 2@2>3 3@5>6", "1 2 3", id="a late upload"),
        pytest.param("9@1>3 1@2>9 2@8>10", "9 1 2", id="begun again before the upload"),
        pytest.param("best@1>2 last@5>6 mid@3>4", "best mid last", id="names without numbers"),
        pytest.param("best@7>7! last@8>9", "best last", id="no numbers, ahead"),
        pytest.param("1@1>2 final@9>9 2@3>4", "1 2 final", id="final"),
        pytest.param("1@1>2 2@-9>4 final@9>9", "1 2 final", id="final after the past"),
        pytest.param(
            "epoch-0-step-9.ckpt@1>2 epoch-1-step-18.ckpt@-9>4",
            "epoch-0-step-9.ckpt epoch-1-step-18.ckpt",
            id="epochs",
        ),
        pytest.param(
            "run-1.checkpoint-9@1>2 run-2.checkpoint-3@3>4 run-2.checkpoint-6@-9>6",
            "run-1.checkpoint-9 run-2.checkpoint-3 run-2.checkpoint-6",
            id="trials",
        ),
        pytest.param(
            "checkpoint_2026-01-02_03-04-05.999999@1>2 checkpoint_2026-01-02_03-05-05.000001@3>4",
            "checkpoint_2026-01-02_03-04-05.999999 checkpoint_2026-01-02_03-05-05.000001",
            id="dates as names",
        ),
    ],
)
def test_order(saves: str, expected: str) -> None:
    assert ordered(saves) == expected.split()


@given(st.data())
def test_one_wrong_date_changes_nothing_wherever_trainings_began_again(data: st.DataObject) -> None:
    """Each save is sent after it was written and before the next; one date is wrong."""
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    every = [
        (training, step) for training, count in enumerate(lengths) for step in range(1, count + 1)
    ]
    wrong = data.draw(st.sampled_from(range(len(every))))
    far = data.draw(st.sampled_from([-99 * DAY, 99 * DAY]))
    dates = [
        SaveDates(
            f"checkpoint-{step}",
            min(10.0 * at + (far if at == wrong else 0), 10.0 * at + 5),
            10.0 * at + 5,
            at == wrong and far > 0,
        )
        for at, (_, step) in enumerate(every)
    ]
    found = [dates.index(d) for d in oldest_first(dates, lambda d: d)]
    if wrong and every[wrong][1] == 1:  # that it begins a training, only its date could show
        last = max((at for at in range(len(every)) if at != wrong), default=0)
        if last > wrong:
            assert found[-1] == len(every) - 1
    else:
        assert found == list(range(len(every)))


@pytest.mark.parametrize(
    ("saves", "expected"),
    [
        ("1@1>2 2@3>4 3@5>6", []),
        ("1@1>2 2@3>4 3@-99>6", ["3 2 -102"]),
        ("1@1>2 2@-99>4 3@5>6 4@7>8", ["2 1 -100"]),
        ("1@50>52 2@53>54 3@-9>56 4@-8>57 5@58>59", ["3 2 -62", "4 2 -61"]),
        ("1@80>99 2@3>99 3@5>99 4@6>99", ["1 2 77"]),
        ("1@1>2 2@4>4! 3@5>6", []),
        ("900@1>2 100@30>31 200@50>51", []),
        ("1@1>2 2@0.5>4", []),
    ],
)
def test_contradictions(saves: str, expected: list[str]) -> None:
    its = [save(line) for line in saves.split()]
    found = contradictions(its, lambda s: s[1], 10.0)
    assert [f"{a[0]} {b[0]} {apart:g}" for a, b, apart in found] == expected
