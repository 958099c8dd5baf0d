"""SIGTERM is noted once, and fatal again after that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from grpo_trainer.preemption import EXIT_CODE, SignalNotice, TerminationNotice


def test_the_exit_code_is_that_of_a_terminated_process():
    assert EXIT_CODE == 143  # 128 + 15


def test_a_termination_is_noted_and_the_default_is_back_afterwards():
    notice = TerminationNotice()
    with notice:
        assert not notice.given
        os.kill(os.getpid(), signal.SIGTERM)
        assert notice.given
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with notice:
        assert not notice.given  # of the run before


def test_a_handler_of_the_users_own_is_left_alone(monkeypatch):
    came = []
    previous = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    try:
        with TerminationNotice() as notice:
            os.kill(os.getpid(), signal.SIGTERM)
        assert came == [True] and not notice.given
    finally:
        signal.signal(signal.SIGTERM, previous)


def test_a_thread_that_gets_no_signals_goes_without():
    failures = []

    def enter():
        try:
            with TerminationNotice():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not failures


@pytest.mark.parametrize(("grace", "ended"), [(0.0, True), (60.0, False)])
def test_a_termination_is_fatal_when_it_comes_again_later_but_not_when_it_is_passed_on_twice(grace, ended):
    code = (
        "import os, signal, sys; sys.path.insert(0, '.');"
        f"from grpo_trainer import preemption; preemption.GRACE = {grace};"
        "c = preemption.TerminationNotice(); c.__enter__();"
        "[os.kill(os.getpid(), signal.SIGTERM) for _ in range(2)]; print('still here')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode == -signal.SIGTERM) is ended
    assert ("still here" in done.stdout) is not ended


def test_what_is_to_be_done_is_done_when_a_signal_comes_for_the_first_time():
    heard = []
    with SignalNotice(signal.SIGINT, grace=60.0, heard=lambda: heard.append(1)) as notice:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
    assert heard == [1] and notice.given


def test_an_interrupt_that_comes_again_is_one():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), SignalNotice(signal.SIGINT, grace=0.0):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
