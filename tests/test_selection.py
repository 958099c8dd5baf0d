"""Fields about which prompts a step is made of: each alone, and those that contradict each other."""

from __future__ import annotations

import pytest

from grpo_trainer import GRPOConfig

COMMON = dict(bf16=False, use_cpu=True, report_to="none", per_device_train_batch_size=4, num_generations=2)
DYNAMIC = {"dynamic_sampling": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({**DYNAMIC, "dynamic_sampling_at_cap": "stop"}, "unknown.*Legal: fill, partial, error"),
        ({**DYNAMIC, "dynamic_sampling_max_rounds": 0}, "must be a whole number, 1 or more"),
        ({**DYNAMIC, "dynamic_sampling_max_age": True}, "must be a whole number, 0 or more"),
        ({"dynamic_sampling_max_age": 2}, "nothing to act on.*dynamic_sampling=True"),
        ({**DYNAMIC, "beta": 0.1, "kl_placement": "reward"}, "differ by the KL"),
        ({"prompt_sampling": "hardest"}, "unknown.*Legal: uniform, skip_solved_and_hopeless, variance"),
        ({"prompt_pass_reward": 2.0}, "nothing to act on.*Set prompt_sampling"),
        ({"prompt_sampling": "uniform", "prompt_skip_epochs": 2}, "no prompt is left out"),
        ({"prompt_sampling": "skip_solved_and_hopeless", "prompt_skip_epochs": 0}, "whole number, 1 or more"),
        ({"prompt_sampling": "variance", "prompt_pass_reward": float("nan")}, "prompt_pass_reward"),
    ],
)
def test_what_contradicts_itself_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig("out", **{**COMMON, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**DYNAMIC, "dynamic_sampling_max_age": 0, "dynamic_sampling_at_cap": "partial"},
        {**DYNAMIC, "beta": 0.1},
        {"prompt_sampling": "skip_solved_and_hopeless", "prompt_skip_epochs": 3, "prompt_pass_reward": 0.5},
    ],
)
def test_what_fits_together_is_taken(settings):
    config = GRPOConfig("out", **{**COMMON, **settings})
    assert {name: getattr(config, name) for name in settings} == settings


def test_everything_is_off_by_default():
    config = GRPOConfig("out", **COMMON)
    assert not config.dynamic_sampling and config.prompt_sampling is None
