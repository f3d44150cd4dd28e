"""The first signal is a wish, the second an order."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tailguard.runs.signals import Interrupted, StopSignals, interrupting


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process_at_once(first: int, second: int) -> None:
    child = os.fork()
    if child == 0:
        with StopSignals() as stop:
            os.kill(os.getpid(), first)
            if stop.received == first:
                os.kill(os.getpid(), second)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == second


def test_afterwards_signals_mean_what_they_meant_before() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.received == signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_outside_the_main_thread_signals_are_left_alone() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found: list[object] = []

    def work() -> None:
        with StopSignals() as stop:
            found.extend([stop.received, signal.getsignal(signal.SIGTERM)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [None, before]


def test_hang_ups_are_a_wish_each_time_and_none_under_nohup() -> None:
    with StopSignals() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == signal.SIGHUP
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_the_work_under_way_and_a_second_one_ends_the_process(
    first: int, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]

    def work() -> None:
        try:
            os.kill(os.getpid(), first)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)  # the shell's and the system's, when a terminal closes
            assert signal.getsignal(signal.SIGINT) == signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    with pytest.raises(Interrupted) as caught, interrupting("rounds are kept"):
        work()
    assert caught.value.number == first
    assert "stopping; rounds are kept; a second Ctrl-C stops at once" in capfd.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
