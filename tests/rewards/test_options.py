"""How a reward is run is declared where it is written, and changed by the configuration."""

from __future__ import annotations

import functools

import pytest

from grpo_trainer.rewards.options import RewardOptions, check_option_names, options_of, reward, with_options


@reward(isolation="process", time_limit=2.0)
def declared(completions, scale=1.0, **kwargs):
    return [scale for _ in completions]


def test_a_function_declares_how_it_is_run_and_can_still_be_called():
    assert options_of(declared) == RewardOptions(isolation="process", time_limit=2.0)
    assert declared(["a"]) == [1.0]


def test_a_partial_is_run_like_its_function_and_a_plain_function_inline():
    assert options_of(functools.partial(declared, scale=2.0)).time_limit == 2.0
    assert options_of(lambda completions, **kwargs: []) == RewardOptions(isolation="inline")


def test_the_configuration_changes_single_options():
    changed = options_of(declared, time_limit=9, on_error=0)
    assert (changed.isolation, changed.time_limit, changed.on_error) == ("process", 9, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"isolation": "thread"}, "isolation is 'thread'; use one of inline, process, sandbox"),
        ({"isolation": "process", "time_limit": 0}, "time_limit is 0; use a number above 0"),
        ({"isolation": "process", "memory_limit": -1}, "memory_limit is -1"),
        ({"rows_per_call": True}, "rows_per_call is True"),
        ({"on_error": "zero"}, "on_error is 'zero'; use raise, none or a number"),
        ({"on_timeout": True}, "on_timeout is True"),
        ({"group": 1}, "group is 1; use true or false"),
        ({"cache": "yes"}, "cache is 'yes'; use true or false"),
        ({"imports": "sympy"}, "imports is 'sympy'; use a list of names of modules"),
        (
            {"isolation": "process", "group": True, "rows_per_call": 2},
            "rows_per_call=2 would cut it; leave one of them",
        ),
        ({"time_limit": 1.0}, "set isolation to process or sandbox"),
    ],
)
def test_options_that_are_not_legal_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        RewardOptions(**options)


def test_a_function_with_other_options_is_another_and_its_own_stay():
    changed = with_options(declared, time_limit=5.0)
    again = with_options(functools.partial(changed, scale=3.0), on_error="none")
    assert with_options(declared) is declared
    assert [options_of(f).time_limit for f in (declared, changed, again)] == [2.0, 5.0, 5.0]
    assert options_of(again).on_error == "none"
    assert again(["a"]) == [3.0]


def test_an_unknown_option_is_refused_with_the_nearest_one():
    check_option_names(["time_limit", "group"], "here")
    with pytest.raises(ValueError, match=r"here has no option 'tme_limit'\. Did you mean 'time_limit'\? Legal: isol"):
        check_option_names(["tme_limit"], "here")
