"""What all prompts begin with is computed once, and nothing else changes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.generation.group import GroupGenerator
from grpo_trainer.generation.prefill import common_length
from tests.generation import families
from tests.generation.doubles import sampling, watch

SHARED = tuple(range(30, 70))
MIXED = [SHARED + rest for rest in [(5, 6, 7), (5, 9), (11,), tuple(range(20, 36)), (40, 41), (5, 6, 8, 90)]]
EVEN = [SHARED + rest for rest in [(5, 6, 7), (5, 9, 1), (11, 3, 3), (20, 21, 22), (40, 41, 42), (5, 6, 8)]]
GROUPS = [3, 1, 2, 2, 1, 2]
ENDS = tuple(range(1, families.VOCAB_SIZE, 9))


def draw(model, prompts, room=None, groups=GROUPS, **knobs):
    params = sampling(**{"max_new_tokens": 12, "eos_token_ids": ENDS, "temperature": 0.0, **knobs})
    return GroupGenerator(lambda: model, max_cache_tokens=room).generate(prompts, groups, params, seed=0)


def prefills(seen):
    """Of each pass that computes prompts: rows, columns, and tokens that the cache held before."""
    return [tuple(call["input_ids"].shape) for call in seen if not hasattr(cache_of(call), "rows")]


def cache_of(call):
    return call.get("cache", call.get("past_key_values"))


@pytest.mark.parametrize("prompts", [MIXED, EVEN], ids=["mixed", "even"])
@pytest.mark.parametrize("name", families.DENSE)
def test_every_family_says_what_generate_says_to_each_prompt_alone(name, prompts):
    model = families.family(name)
    config = families.greedy_config(sampling(max_new_tokens=12, eos_token_ids=ENDS))
    alone = [families.generate_alone(model, prompt, config) for prompt in prompts]
    expected = tuple(ids for ids, n in zip(alone, GROUPS, strict=True) for _ in range(n))
    for room in (None, 70, 150, 300):
        assert draw(model, prompts, room).ids == expected


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_captured_log_probs_are_those_of_a_fresh_forward_pass(name):
    model = families.family(name)
    out = draw(model, MIXED, room=150, temperature=0.8)
    rows = [prompt for prompt, n in zip(MIXED, GROUPS, strict=True) for _ in range(n)]
    for prompt, ids, logprobs in zip(rows, out.ids, out.sampling_logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        fresh = (logits.double() / 0.8).log_softmax(-1)[range(len(ids)), list(ids)]
        assert logprobs == pytest.approx(fresh.tolist(), abs=1e-5)


def test_what_is_shared_is_computed_once_in_a_rollout():
    model = families.family("llama")
    seen = watch(model)
    draw(model, MIXED)
    # padding the shortest to the longest would cost more than a pass of its own
    assert prefills(seen) == [(1, len(SHARED)), (5, 16), (1, 1)]
    seen.clear()
    draw(model, MIXED, room=150, groups=[1] * 6)  # two rows at a time: places are refilled
    first, *others = prefills(seen)
    assert first == (1, len(SHARED)) and len(others) >= 3
    assert sum(rows for rows, _ in others) == len(MIXED) and max(columns for _, columns in others) == 16


def test_prompts_of_different_length_are_computed_whole_where_a_window_slides():
    model = families.family("gemma3")
    seen = watch(model)
    draw(model, MIXED[3:], groups=GROUPS[3:])
    assert prefills(seen) == [(3, len(MIXED[3]))]
    seen.clear()
    draw(model, EVEN)
    assert prefills(seen) == [(1, len(SHARED)), (6, 3)]


def test_a_beginning_that_costs_less_than_a_pass_of_its_own_is_computed_with_each_prompt():
    model = families.family("llama")
    seen = watch(model)
    draw(model, [prompt[-23:] for prompt in EVEN[:4]], groups=[1] * 4)  # 3 x 20 tokens would be saved
    assert prefills(seen) == [(4, 23)]
    seen.clear()
    draw(model, [prompt[-26:] for prompt in EVEN[:4]], groups=[1] * 4)  # 3 x 23
    assert prefills(seen) == [(1, 23), (4, 3)]


def test_a_prompt_for_which_nothing_is_drawn_does_not_count():
    model = families.family("llama")
    seen = watch(model)
    draw(model, [*MIXED, (9, 9)], groups=[*GROUPS, 0])
    assert prefills(seen)[0] == (1, len(SHARED))


def test_equal_prompts_share_all_but_their_last_token():
    model = families.family("llama")
    seen = watch(model)
    out = draw(model, [MIXED[3]] * 3, groups=[1] * 3)
    assert prefills(seen) == [(1, 55), (3, 1)]
    assert out.ids == draw(model, [MIXED[3]], groups=[3]).ids


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5))
def test_the_common_length_is_the_most_tokens_that_all_agree_on(prompts):
    expected = 0
    while len({tuple(p[: expected + 1]) for p in prompts}) == 1 and min(map(len, prompts)) > expected + 1:
        expected += 1
    assert common_length(prompts) == expected
