from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptsync.errors import CkptsyncError, ConfigError, Exists, NotFound, StoreError, Transient
from ckptsync.stores.contract import About, Chunk, Store, read_all
from ckptsync.stores.memory import MemoryStore
from ckptsync.stores.retry import CAP, Persistence, Retrying
from tests.support.flaky_store import FailsAt, Flaky
from tests.support.store_contract import StoreContract, names


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def persistence(
        self, patience: float = 120.0, chance: Callable[[], float] = lambda: 1.0
    ) -> Persistence:
        return Persistence(patience, clock=lambda: self.now, sleep=self.sleep, chance=chance)


class Failing:
    """Raises ``errors`` in turn, then gives 42."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return 42


def busy(times: int, **more: float) -> Failing:
    return Failing(*(Transient(f"busy {n}", hint="look", **more) for n in range(times)))


class TestRetryingFlaky(StoreContract):
    """Every seventh moment fails.

    Iterators that have begun cannot be had again, so chunks are made lists.
    """

    @pytest.fixture
    def store(self) -> Store:
        return Listed(Retrying(Flaky(MemoryStore(), 7), Persistence(120, sleep=lambda _: None)))

    @pytest.fixture
    def again(self, store: Store) -> Store:
        return store

    test_nothing_shows_until_the_last_chunk = None  # type: ignore[assignment]  # it looks while an iterator is being used


class Listed(Retrying):
    """Makes chunks a list of copies, so that a write can be tried again."""

    def __init__(self, store: Retrying) -> None:
        super().__init__(store.inner, store._persistence)

    def _put(self, chunks: object, put: Callable[..., None]) -> None:
        super()._put([bytes(chunk) for chunk in chunks], put)  # type: ignore[attr-defined]


def test_what_fails_transiently_is_tried_again_with_waits_that_double_up_to_a_cap() -> None:
    clock, failing = Clock(), busy(10)
    assert clock.persistence(1000).call(failing) == 42
    assert clock.slept == [0.25, 0.5, 1, 2, 4, 8, 16, CAP, CAP, CAP]


def test_waits_are_drawn_from_nothing_to_the_bound() -> None:
    clock, draws = Clock(), iter([0.0, 0.5, 0.25])
    clock.persistence(chance=lambda: next(draws)).call(busy(3))
    assert clock.slept == [0, 0.25, 0.25]


def test_after_patience_the_last_error_is_raised_and_its_hint_says_how_long_was_tried() -> None:
    clock, failing = Clock(), busy(10_000)
    with pytest.raises(Transient, match=r"^busy 10$") as caught:
        clock.persistence(120).call(failing)
    assert sum(clock.slept) == 120, "the last try is made when patience ends"
    assert caught.value.hint == "look; given up after 11 tries in 120 s"


@pytest.mark.parametrize(
    "error",
    [StoreError("denied"), NotFound("a"), Exists("a"), KeyboardInterrupt(), OSError(5, "io")],
)
def test_what_is_permanent_is_raised_at_once(error: BaseException) -> None:
    clock, failing = Clock(), Failing(error)
    with pytest.raises(type(error)):
        clock.persistence().call(failing)
    assert failing.calls == 1
    assert not clock.slept


def test_a_configuration_that_worked_is_tried_again_and_another_is_not() -> None:
    clock, error = Clock(), ConfigError("permission denied", hint="look")
    persistence = clock.persistence()
    with pytest.raises(ConfigError):
        persistence.call(Failing(error))
    assert not clock.slept
    assert persistence.call(Failing()) == persistence.call(Failing(error)) == 42
    with pytest.raises(Transient, match="permission denied") as caught:
        persistence.call(Failing(*[error] * 1000))
    assert caught.value.hint.startswith("look; given up")


def test_a_server_that_says_when_is_not_asked_before() -> None:
    clock = Clock()
    assert clock.persistence(chance=lambda: 0.0).call(busy(2, after=7.5)) == 42
    assert clock.slept == [7.5, 7.5]


def test_a_server_that_says_later_than_patience_lasts_is_not_waited_for() -> None:
    clock = Clock()
    with pytest.raises(Transient, match="busy 0") as caught:
        clock.persistence(120).call(busy(1, after=121))
    assert not clock.slept
    assert caught.value.hint == "look"
    # later than what is left of it
    with pytest.raises(Transient, match="busy 1"):
        clock.persistence(120).call(busy(2, after=70))
    assert clock.slept == [70]


def test_without_patience_there_is_one_try_and_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(Transient, match="busy 0"):
        Clock().persistence(0).call(busy(1))
    assert not caplog.records


def test_patience_counts_from_the_first_failure_not_from_the_start() -> None:
    clock, failing = Clock(), busy(1)

    def slow() -> int:
        clock.now += 500  # a stall that was noticed late
        return failing()

    assert clock.persistence(120).call(slow) == 42


def test_a_failure_and_its_recovery_are_one_line_each_however_many_tries_and_threads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    at_once = threading.Barrier(4)

    def sleep(_: float) -> None:
        at_once.wait(60)

    both = Persistence(120, sleep=sleep)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(both.call, [busy(3) for _ in range(4)])) == [42] * 4
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    first, last = (record.message for record in caplog.records)
    assert first == "busy 0: trying again for up to 120 s"
    assert last.startswith("the store works again after ")


def test_an_outage_that_outlasts_patience_many_times_and_its_end_are_one_line_each(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    persistence = clock.persistence(10)
    for _ in range(3):
        with pytest.raises(Transient):
            persistence.call(busy(1000))
    assert [record.message for record in caplog.records] == ["busy 0: trying again for up to 10 s"]
    for failures in (0, 0, 2, 0):
        persistence.call(busy(failures))
    assert [record.message.partition(" after")[0] for record in caplog.records[1:]] == [
        "the store works again",
        "busy 0: trying again for up to 10 s",
        "the store works again",
    ]
    assert float(caplog.records[1].message.split()[-2]) >= 30


@pytest.mark.parametrize("nth", [2, 3, 5])
@pytest.mark.parametrize("error", [Transient, ConfigError])
def test_a_listing_that_breaks_goes_on_behind_the_last_name(
    nth: int, error: type[CkptsyncError]
) -> None:
    inner = MemoryStore()
    for n in range(40):
        inner.write(f"run/{n:02}", [b"x"])

    class Breaks(MemoryStore):
        told = 0

        def names(self, prefix: str) -> Iterator:  # type: ignore[type-arg]
            for n, entry in enumerate(inner.names(prefix)):
                if n == self.told + nth:
                    self.told = n
                    raise error("the connection broke, or the key was changed")
                yield entry

    assert names(Retrying(Breaks(), Clock().persistence())) == [f"run/{n:02}" for n in range(40)]


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_chunks_are_sent_again_if_they_can_be_had_again(nth: int) -> None:
    clock, inner = Clock(), MemoryStore()
    Retrying(FailsAt(inner, nth), clock.persistence()).write("a", [b"one", b"two"], About(6))
    assert read_all(inner, "a") == b"onetwo"
    clock = Clock()
    store = Retrying(FailsAt(MemoryStore(), nth), clock.persistence())
    if nth == 1:  # none of the iterator was taken
        store.write("a", iter([b"one", b"two"]))
    elif nth < 4:
        with pytest.raises(Transient, match="503") as caught:
            store.write("a", iter([b"one", b"two"]))
        assert not clock.slept
        assert not caught.value.hint


def test_a_source_that_fails_transiently_is_not_the_store_and_is_not_asked_again() -> None:
    class Source:
        asked = 0

        def __iter__(self) -> Iterator[Chunk]:
            self.asked += 1
            yield b"one"
            raise Transient("the source's server said 503")

    source, clock = Source(), Clock()
    with pytest.raises(Transient, match="the source's"):
        Retrying(MemoryStore(), clock.persistence()).write("a", source)
    assert source.asked == 1
    assert not clock.slept


def test_creating_whose_answer_was_lost_may_find_its_own_bytes() -> None:
    class Mute(MemoryStore):
        said = 0

        def create(self, *args: object) -> None:
            super().create(*args)  # type: ignore[arg-type]
            self.said += 1
            raise Transient("the answer was lost")

    inner = Mute()
    with pytest.raises(Exists):
        Retrying(inner, Clock().persistence()).create("a", [b"mine"])
    assert read_all(inner, "a") == b"mine"
