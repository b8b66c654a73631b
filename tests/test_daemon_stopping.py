"""Signals: a clean stop, then an end."""

import os
import signal
import subprocess
import sys
import threading
import time

from ckptsync.daemon.stopping import stopping


def test_a_signal_ends_the_wait_at_once() -> None:
    with stopping() as stop:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        begun = time.monotonic()
        assert stop.wait(10)
        assert time.monotonic() - begun < 5
        assert stop.code == 0


def test_a_fault_in_a_thread_decides_the_exit_code_and_a_later_signal_does_not() -> None:
    with stopping() as stop:
        thread = threading.Thread(target=stop.ask, args=(1,))
        thread.start()
        assert stop.wait(10)
        thread.join()
        stop.ask(0)
        stop.ask(2)
        assert stop.code == 1


def test_nothing_asked_is_a_whole_wait_and_handlers_are_given_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stopping() as stop:
        assert not stop.wait(0.05)
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_sighup_is_a_wish_that_is_heard_once_and_is_not_heard_where_it_is_ignored() -> None:
    with stopping() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert (stop.taken(), stop.taken(), stop.asked) == (True, False, False)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    try:
        with stopping() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.taken()
    finally:
        signal.signal(signal.SIGHUP, before)


STUBBORN = """
import time
from ckptsync.daemon.stopping import stopping
with stopping() as stop:
    print("ready", flush=True)
    stop.wait(30)
    print("first", flush=True)
    time.sleep(30)
"""


def test_a_second_signal_ends_the_process_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert child.stdout.readline() == "ready\n"
        child.send_signal(signal.SIGTERM)
        assert child.stdout.readline() == "first\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(5) == 128 + signal.SIGINT
