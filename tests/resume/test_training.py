"""Signals of a training, before it has begun and after."""

from __future__ import annotations

import os
import signal

from ckptsync.resume.training import Signals, exit_code_of, read_signal_map


def test_a_signal_before_the_start_reaches_the_training_by_its_map_and_counts() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN), signal.getsignal(signal.SIGUSR1)
    try:
        signals = Signals(read_signal_map(["USR1=TERM", "USR2=NONE"]))
        pids: list[int] = []
        with signals.handled():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            signal.raise_signal(signal.SIGUSR2)
            assert (signals.count, signals.is_ending) == (0, False)
            signal.raise_signal(signal.SIGUSR1)
            assert (signals.count, signals.is_ending) == (1, True)
            status = signals.run(["sleep", "600"], os.environ, pids.append)
        assert (status, exit_code_of(status), exit_code_of(3)) == (-signal.SIGTERM, 143, 3)
        assert len(set(pids)) == 1
        assert signal.getsignal(signal.SIGUSR1) == before[1]
    finally:
        signal.signal(signal.SIGHUP, before[0])
