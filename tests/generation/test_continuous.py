"""Continuous batching draws what ``generate`` draws, tells its log-probs, and leaves the policy as it was."""

from __future__ import annotations

import signal
import threading

import pytest
import torch

from grpo_trainer import GRPOConfig
from grpo_trainer.generation.continuous import ContinuousGenerator
from grpo_trainer.generation.hf import HFGenerator
from tests import helpers
from tests.generation import families
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


@pytest.mark.slow
@pytest.mark.parametrize("name", families.DENSE)
def test_every_family_says_what_generate_says_to_each_prompt_alone(name):
    model = families.family(name)
    config = families.greedy_config(sampling(max_new_tokens=12, eos_token_ids=()))
    alone = [families.generate_alone(model, prompt, config) for prompt in PROMPTS]
    got = draw(model, temperature=0.0, max_new_tokens=12, eos_token_ids=())
    assert got.ids == tuple(ids for ids, n in zip(alone, COUNTS, strict=True) for _ in range(n))


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("T5ForConditionalGeneration", {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1}, "has an encoder"),
        ("MambaForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}, "keeps a state"),
        ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}, "takes no position_ids"),
    ],
)
def test_a_model_that_it_cannot_decode_is_refused_with_the_reason(kind, settings, reason):
    model = families.build(kind, vocab_size=64, **settings)
    with pytest.raises(ValueError, match=f"'continuous_batching' cannot be used because .*{reason}.*='auto'"):
        ContinuousGenerator(lambda: model).check(sampling())


def test_an_attention_that_cannot_be_exchanged_is_refused(monkeypatch):
    model = helpers.tiny_llama()
    monkeypatch.setattr(type(model), "_supports_attention_backend", False)
    with pytest.raises(ValueError, match="the attention of LlamaForCausalLM cannot be exchanged"):
        ContinuousGenerator(lambda: model).check(sampling())


def test_an_adapter_takes_part_and_one_of_learned_tokens_is_refused():
    import peft

    model = families.family("llama")
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    params = {"temperature": 0.0, "max_new_tokens": 8, "eos_token_ids": ()}
    expected = HFGenerator(lambda: adapted).generate(PROMPTS, COUNTS, sampling(**params), seed=0).ids
    assert draw(adapted, **params).ids == expected
    tuned = peft.get_peft_model(
        families.family("llama"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    with pytest.raises(ValueError, match="puts learned tokens in front of the prompt"):
        ContinuousGenerator(lambda: tuned).check(sampling())


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


def test_an_interrupt_leaves_the_policy_as_it_was_and_nothing_running():
    model = helpers.tiny_llama().train()
    calls = []

    def interrupt(module, args, kwargs):
        calls.append(1)
        if len(calls) == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    handle = model.register_forward_pre_hook(interrupt, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        draw(model, max_new_tokens=200, eos_token_ids=())
    handle.remove()
    assert model.training and model.config._attn_implementation == "sdpa"
    assert not [t for t in threading.enumerate() if "atch" in t.name]
    assert draw(model) == draw(helpers.tiny_llama())


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
