from __future__ import annotations

import contextlib
import os
import signal
from types import SimpleNamespace

import pytest

from grpo_trainer.cli.interrupt import train_until_stopped


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Trainer:
    """Notes what it is asked for; ``train`` does what the test says, then leaves as it was asked to."""

    def __init__(self, world_size: int = 1, meanwhile=press) -> None:
        self.args = SimpleNamespace(world_size=world_size)
        self.asked: list[int] = []
        self.meanwhile = meanwhile
        self.resumed_from: str | None = None

    def stop_after_step(self, exit_code: int) -> None:
        self.asked.append(exit_code)

    def train(self, resume_from_checkpoint: str | None) -> None:
        self.resumed_from = resume_from_checkpoint
        self.meanwhile()
        if self.asked:
            raise SystemExit(self.asked[-1])


def run(trainer: Trainer, said: list[str] | None = None) -> int:
    return train_until_stopped(trainer, "here", contextlib.nullcontext(), ([] if said is None else said).append)


def test_a_run_that_is_left_alone_ends_with_0():
    trainer, said = Trainer(meanwhile=lambda: None), []
    assert run(trainer, said) == 0
    assert trainer.resumed_from == "here" and said == []


def test_the_first_press_asks_the_trainer_to_save_and_leave_with_130():
    trainer, said = Trainer(), []
    assert run(trainer, said) == 130
    assert trainer.asked == [130]
    assert len(said) == 1 and "Press it again to stop at once" in said[0]


def test_the_second_press_stops_at_once():
    with pytest.raises(KeyboardInterrupt):
        run(Trainer(meanwhile=lambda: (press(), press())))


def test_with_several_processes_terminal_and_launcher_both_pass_it_on():
    trainer, said = Trainer(world_size=2, meanwhile=lambda: (press(), press())), []
    assert run(trainer, said) == 130
    assert trainer.asked == [130] and "again after 10 seconds" in said[0]


@pytest.mark.parametrize(("code", "passed_on"), [(143, False), (7, True), (None, True)])
def test_a_termination_is_a_stop_too_and_any_other_exit_is_passed_on(code, passed_on):
    def leave() -> None:
        raise SystemExit(code)

    if not passed_on:
        assert run(Trainer(meanwhile=leave)) == code
        return
    with pytest.raises(SystemExit) as end:
        run(Trainer(meanwhile=leave))
    assert end.value.code == code


def test_the_handler_before_it_is_put_back():
    before = signal.getsignal(signal.SIGINT)
    inside = []

    def fail() -> None:
        inside.append(signal.getsignal(signal.SIGINT))
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run(Trainer(meanwhile=fail))
    assert inside != [before] and signal.getsignal(signal.SIGINT) is before
