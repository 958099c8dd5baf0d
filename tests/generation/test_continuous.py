"""Continuous batching draws what ``generate`` draws, tells its log-probs, and leaves the policy as it was."""

from __future__ import annotations

import threading

import pytest
import torch

from grpo_trainer import GRPOConfig
from grpo_trainer.generation.continuous import ContinuousGenerator
from grpo_trainer.generation.hf import HFGenerator
from tests import helpers
from tests.generation.doubles import PROMPTS, sampling
from tests.test_trainer import logs, make

COUNTS = [2, 3, 1]


def draw(model, seed=5, config=None, room=None, row_ids=None, **knobs):
    generator = ContinuousGenerator(lambda: model, config, room)
    return generator.generate(PROMPTS, COUNTS, sampling(**knobs), seed=seed, row_ids=row_ids)


@pytest.mark.parametrize("room", [None, 40])
def test_greedy_decoding_is_that_of_generate(room):
    model = helpers.tiny_llama()
    expected = HFGenerator(lambda: model).generate(PROMPTS, COUNTS, sampling(temperature=0.0), seed=0)
    got = draw(model, temperature=0.0, room=room)
    assert (got.ids, got.finished) == (expected.ids, expected.finished)


def test_an_end_of_sequence_token_is_the_last_and_says_that_the_row_has_finished():
    model = helpers.tiny_llama()
    got = draw(model, eos_token_ids=tuple(range(60)))
    assert any(got.finished) and sum(map(len, got.ids)) < 6 * 5
    for ids, finished in zip(got.ids, got.finished, strict=True):
        assert [token < 60 for token in ids] == [False] * (len(ids) - 1) + [finished]
        assert finished or len(ids) == 5


def test_log_probs_are_those_of_a_fresh_forward_pass():
    model = helpers.tiny_llama().eval()
    got = draw(model, temperature=0.7)
    prompts = [p for p, n in zip(PROMPTS, COUNTS, strict=True) for _ in range(n)]
    for prompt, ids, told in zip(prompts, got.ids, got.sampling_logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        fresh = (logits / 0.7).log_softmax(-1)[range(len(ids)), list(ids)]
        assert torch.allclose(torch.tensor(told), fresh, atol=1e-5)


def test_a_seed_and_the_first_row_decide_the_draws():
    model = helpers.tiny_llama()
    rows = [[(p + shift, c) for p, n in enumerate(COUNTS) for c in range(n)] for shift in (0, 7)]
    assert draw(model, row_ids=rows[0]) == draw(model, row_ids=rows[0]) != draw(model, row_ids=rows[1])
    assert draw(model, seed=5) != draw(model, seed=6)


def test_the_policy_is_left_as_it_was_and_nothing_runs_on():
    model = helpers.tiny_llama().train()
    model.gradient_checkpointing_enable()
    model.generation_config.temperature = 0.3
    state = torch.get_rng_state()
    before = {name: p.clone() for name, p in model.named_parameters()}
    draw(model)
    assert model.training and model.is_gradient_checkpointing and model.generation_config.temperature == 0.3
    assert model.config._attn_implementation == "sdpa" and model.dtype == torch.float32
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not [t for t in threading.enumerate() if "atch" in t.name]


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"repetition_penalty": 1.2}, "RepetitionPenaltyLogitsProcessor"),
        ({"min_p": 0.1}, "MinPLogitsWarper"),
        ({"extra": {"bad_words_ids": [[3]]}}, "NoBadWordsLogitsProcessor"),
        ({"extra": {"stop_strings": ["x"]}}, "stop_strings"),
    ],
)
def test_what_it_would_leave_out_is_refused(knobs, named):
    with pytest.raises(ValueError, match=f"cannot draw with {named}; leave out what asks for it, or set generation_en"):
        draw(helpers.tiny_llama(), tokenizer=helpers.tiny_tokenizer(), **knobs)


def test_it_is_refused_when_a_trainer_is_made(tmp_path):
    with pytest.raises(ValueError, match="cannot draw with MinPLogitsWarper"):
        make(tmp_path, generation_engine="continuous_batching", min_p=0.1)


def test_a_run_with_the_names_of_trl(tmp_path):
    trainer = make(
        tmp_path,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config='{"max_batch_tokens": 32}',
        sampler_correction=True,
    )
    assert trainer.args.generation_engine == "continuous_batching"
    trainer.train()
    assert len(logs(trainer, "reward")) == 2
    assert max(logs(trainer, "sampling/sampling_logp_difference/max")) < 1e-4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_transformers_paged": True, "generation_engine": "group"}, "contradict each other"),
        ({"transformers_continuous_batching_config": {"num_blocks": 3}}, "nothing to act on"),
        ({"max_cache_tokens": 0}, "must be a whole number"),
        ({"max_cache_tokens": 6, "max_completion_length": 6}, "has no room for one completion"),
        ({"max_cache_tokens": 600, "generation_engine": "generate"}, "is about the group engine"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        GRPOConfig("out", bf16=False, use_cpu=True, report_to="none", **settings)


def test_an_unknown_field_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"'num_block' is no field.*Did you mean 'num_blocks'"):
        ContinuousGenerator(lambda: None, {"num_block": 3})
