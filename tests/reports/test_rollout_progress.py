"""The line of progress appears during long rollouts only, and goes with them."""

from __future__ import annotations

import io

import pytest

from grpo_trainer.reports import rollout_progress as module
from grpo_trainer.reports.rollout_progress import rollout_progress
from tests.test_trainer import make


def shown(monkeypatch, delay, events):
    out = io.StringIO()
    plain = module.tqdm
    monkeypatch.setattr(module, "tqdm", lambda **options: plain(**{**options, "file": out, "mininterval": 0}))
    monkeypatch.setattr(module, "DELAY", delay)
    with rollout_progress(4) as observer:
        events(observer)
    return out.getvalue()


def some(observer):
    for number in range(3):
        observer.tick(4)
        observer.finished(0, number, (1, 2), True)


def test_completions_and_tokens_per_second_are_counted(monkeypatch):
    text = shown(monkeypatch, 0.0, some)
    assert "rollout" in text and "3/4" in text and "tokens/s" in text


def test_a_short_rollout_shows_nothing(monkeypatch):
    assert shown(monkeypatch, 1000.0, some).strip() == ""


@pytest.mark.parametrize(("terminal", "seconds"), [(True, 1.0), (False, 30.0)])
def test_a_file_is_not_filled_with_it(monkeypatch, terminal, seconds):
    asked = []
    plain = module.tqdm
    monkeypatch.setattr(module, "tqdm", lambda **options: asked.append(options) or plain(**options))
    monkeypatch.setattr(module.sys, "stderr", type("Stream", (io.StringIO,), {"isatty": lambda self: terminal})())
    with rollout_progress(4) as observer:
        some(observer)
    assert asked[0]["mininterval"] == seconds


def test_it_is_gone_when_drawing_fails(monkeypatch):
    def fails(observer):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shown(monkeypatch, 0.0, fails)


@pytest.mark.parametrize("quiet", [True, False])
def test_the_trainer_shows_it_unless_told_to_be_quiet(quiet, tmp_path):
    trainer = make(tmp_path, disable_tqdm=quiet)
    assert (trainer.collector.progress is rollout_progress) == (not quiet)


def test_where_there_is_another_bar_a_line_is_said_now_and_then(monkeypatch):
    said, clock = [], iter([0.0, 10.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    spoken = module.Spoken(4, said.append)
    for number in range(4):
        spoken.tick(31)
        spoken.finished(0, number, (1,), True)
    assert said == ["rollout: 1/4 completions, 2 tokens/s", "rollout: 3/4 completions, 2 tokens/s"]


def test_the_bar_of_a_run_says_it(tmp_path):
    from grpo_trainer.reports.progress import RichProgress

    progress = RichProgress(tables=0)
    trainer = make(tmp_path, disable_tqdm=False, callbacks=[progress])
    assert trainer.collector.progress == progress.rollout
    trainer.train()
