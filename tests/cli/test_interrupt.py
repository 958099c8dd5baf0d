from __future__ import annotations

import os
import signal
import threading

import pytest
from transformers.trainer_callback import TrainerControl

from grpo_trainer.cli.interrupt import GracefulStop


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_the_first_press_lets_the_step_finish_and_asks_for_a_checkpoint():
    said: list[str] = []
    stop, control = GracefulStop(said.append), TrainerControl()
    with stop:
        stop.on_step_end(None, None, control)
        assert not (control.should_save or control.should_training_stop)
        press()
        assert stop.requested
        stop.on_step_end(None, None, control)
    assert control.should_save and control.should_training_stop
    assert len(said) == 1 and "Press it again" in said[0]


def test_the_second_press_stops_at_once():
    stop = GracefulStop(lambda line: None)
    with pytest.raises(KeyboardInterrupt), stop:
        press()
        press()


def test_the_handler_before_it_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), GracefulStop(print):
        assert signal.getsignal(signal.SIGINT) != before
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is before


def test_it_does_nothing_outside_the_main_thread():
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with GracefulStop(print):
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
