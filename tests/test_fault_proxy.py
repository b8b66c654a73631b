"""The proxy does what it says, and nothing else: else what is tested behind it is not tested."""

from __future__ import annotations

import http.client
from contextlib import closing

import pytest

from tests.support.fault_proxy import HttpProxy
from tests.support.network_faults import (
    CUT,
    DOWN,
    END,
    HEADLESS,
    STALL,
    UP,
    Answer,
    Break,
    Fault,
    once,
)
from tests.support.scripted_s3 import Say, scripted
from tests.support.waiting import until

BODY = b"0123456789" * 20_000


@pytest.mark.parametrize(
    ("fault", "seen", "is_done"),
    [
        (Break(UP, CUT, HEADLESS), ConnectionError, False),
        (Break(UP, CUT, 70_000), ConnectionError, False),
        (Break(UP, STALL, 70_000), TimeoutError, False),
        (Break(DOWN, CUT, HEADLESS), ConnectionResetError, True),
        (Break(DOWN, END, HEADLESS), http.client.RemoteDisconnected, True),
        (Break(DOWN, END, 1), http.client.IncompleteRead, True),
        (Break(DOWN, STALL, HEADLESS), TimeoutError, True),
        (Answer(503, "SlowDown"), b"<Code>SlowDown</Code>", False),
        (Answer(200, "SlowDown", is_done=True), b"<Code>SlowDown</Code>", True),
    ],
)
def test_a_fault_is_what_it_says_and_tells_whether_the_server_has_it(
    fault: Fault, seen: type[Exception] | bytes, *, is_done: bool
) -> None:
    with (
        scripted(*[Say(200, b"ok")] * 3) as script,
        closing(HttpProxy(("127.0.0.1", int(script.endpoint.rpartition(":")[2])))) as proxy,
        closing(http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)) as client,
    ):

        def put(body: bytes) -> bytes:
            client.request("PUT", "/bucket/k", body)
            return client.getresponse().read()

        def received() -> list[bytes]:
            """Return the bodies that the server has got whole."""
            whole = (a for a in script.asked if str(len(a.body)) == a.headers["content-length"])
            return [request.body for request in whole]

        assert put(BODY) == b"ok"
        proxy.plan = once("PutObject", fault)
        client.close()
        client.timeout = 0.5 if seen is TimeoutError else 60
        if isinstance(seen, bytes):
            assert seen in put(b"2")
        else:
            with pytest.raises(seen):
                put(BODY)
            client.close()
        client.timeout = 60
        assert proxy.faults == [("PutObject", fault)]
        assert until(lambda: len(received()) == 1 + is_done)
        assert put(b"3") == b"ok"
        assert received()[-1] == b"3"
        assert proxy.requests == {"PutObject": 3}
