"""What every engine that draws from the policy itself promises."""

from __future__ import annotations

import contextlib
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig

from grpo_trainer.generation.group import GroupGenerator
from grpo_trainer.generation.hf import HFGenerator
from tests import helpers
from tests.generation.doubles import (
    MODELS,
    PROMPTS,
    counting,
    nearly_uniform,
    sampling,
    state_of,
    unusual,
    watch,
    with_logits,
)


@pytest.fixture(params=[HFGenerator, GroupGenerator])
def engine(request):
    return request.param


def draw(engine, model, prompts=PROMPTS, num_samples=None, *, seed=0, **knobs):
    num_samples = [2] * len(prompts) if num_samples is None else num_samples
    return engine(lambda: model).generate(prompts, num_samples, sampling(**knobs), seed=seed)


def greedy(engine, model, prompts=PROMPTS, **knobs):
    return draw(engine, model, prompts, [1] * len(prompts), **knobs, temperature=0.0).ids


# --- where a completion ends ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pad", [2, 40, 52])
def test_a_completion_ends_with_and_includes_its_first_end_of_sequence(engine, pad):
    # ends: 40 and 50. After 37 come 38, 39, 40; after 49 at once 50; after 60 come 61 to 65, and no end. The padding
    # may be one of the ends, or an id that the model says itself (52).
    out = draw(
        engine, counting(), [(9, 37), (49,), (60,), (50,)], [1, 1, 1, 1], eos_token_ids=(40, 50), pad_token_id=pad
    )
    assert out.ids == ((38, 39, 40), (50,), (61, 62, 63, 64, 65), (51, 52, 53, 54, 55))
    assert out.finished == (True, True, False, False)


def test_an_end_at_the_limit_is_an_end(engine):
    assert draw(engine, counting(), [(35,)], [1], eos_token_ids=(40,)).finished == (True,)
    assert draw(engine, counting(), [(34,)], [1], eos_token_ids=(40,)).finished == (False,)


def test_a_model_without_an_end_goes_on_to_the_limit(engine):
    out = draw(engine, counting(), [(60,)], [1], eos_token_ids=(), max_new_tokens=3)
    assert (out.ids, out.finished) == (((61, 62, 63),), (False,))


# --- which rows -------------------------------------------------------------------------------------------------------


def test_completions_of_a_prompt_stand_together_in_the_order_of_the_prompts(engine):
    out = draw(engine, counting(), [(10,), (99, 20), (30,)], [2, 1, 3], max_new_tokens=2)
    assert out.ids == ((11, 12), (11, 12), (21, 22), (31, 32), (31, 32), (31, 32))
    assert len(out) == 6


def test_prompts_are_padded_on_the_left_and_the_padding_is_masked(engine):
    model = helpers.tiny_llama()
    seen = watch(model)
    draw(engine, model, [(5, 6, 7), (2, 8)], [1, 1])  # 2, the padding, is also a token of a prompt
    assert seen[0]["input_ids"].tolist() == [[5, 6, 7], [2, 2, 8]]
    assert seen[0]["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]


@pytest.mark.parametrize("name", MODELS)
def test_a_prompt_in_a_padded_batch_is_completed_as_it_is_alone(engine, name):
    model = MODELS[name]()
    together = greedy(engine, model)
    assert together == tuple(greedy(engine, model, [prompt])[0] for prompt in PROMPTS)
    # and as the plain forward of the sequence so far says
    for prompt, completion in zip(PROMPTS, together, strict=True):
        for t, token in enumerate(completion):
            with torch.no_grad():
                assert model(torch.tensor([[*prompt, *completion[:t]]])).logits[0, -1].argmax() == token


def test_the_ids_returned_are_the_ids_that_were_sampled_and_fed_back(engine):
    model = helpers.tiny_llama()
    seen = watch(model)
    out = draw(engine, model, max_new_tokens=6, eos_token_ids=())
    fed = torch.cat([call["input_ids"] for call in seen[1:]], dim=1)  # all but the last are fed back
    assert sorted(list(ids[:-1]) for ids in out.ids) == sorted(fed.tolist())  # an engine may decode in another order


def test_no_samples_are_no_completions(engine):
    assert draw(engine, helpers.tiny_llama(), [(5,), (6,)], [0, 0]).ids == ()
    assert draw(engine, helpers.tiny_llama(), [], []).ids == ()
    assert len(draw(engine, helpers.tiny_llama(), [(5,), (6,)], [0, 2])) == 2


def test_an_empty_prompt_is_refused(engine):
    with pytest.raises(ValueError, match="empty prompt"):
        draw(engine, helpers.tiny_llama(), [(5,), ()], [1, 1])
    with pytest.raises(ValueError):
        draw(engine, helpers.tiny_llama(), [(5,), (6,)], [1])


# --- how they are drawn -----------------------------------------------------------------------------------------------


def test_nothing_comes_from_a_checkpoints_own_generation_config(engine):
    defaults = {
        "top_k": 50,
        "top_p": 0.5,
        "temperature": 0.1,
        "repetition_penalty": 3.0,
        "no_repeat_ngram_size": 1,
        "min_new_tokens": 4,
        "suppress_tokens": [20, 21],
        "eos_token_id": 30,
        "forced_eos_token_id": 31,
        "do_sample": False,
    }
    model = helpers.tiny_llama(seed=3)
    plain = draw(engine, model, num_samples=[8] * 3, max_new_tokens=12)
    model.generation_config = GenerationConfig(**defaults)
    assert draw(engine, model, num_samples=[8] * 3, max_new_tokens=12) == plain


@pytest.mark.parametrize("checkpoint", [{}, {"top_k": 50, "temperature": 0.1, "do_sample": True}])
def test_the_whole_vocabulary_can_be_drawn(engine, checkpoint):
    model = nearly_uniform()
    model.generation_config = GenerationConfig(**checkpoint)
    out = draw(engine, model, [(5,)], [256], max_new_tokens=16, eos_token_ids=())
    counts = Counter(token for ids in out.ids for token in ids)
    # 4096 draws of 1000 tokens: each is missed with probability e^-4.1, so about 983 of them occur
    assert sum(counts.values()) == 4096 and 950 < len(counts) <= 1000


def test_an_adapters_base_keeps_its_generation_config_out_as_well(engine):
    import peft

    model = nearly_uniform()
    model.generation_config = GenerationConfig(top_k=2, do_sample=True)
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    original = model.generation_config
    out = draw(engine, adapted, [(5,)], [32], max_new_tokens=4, eos_token_ids=())
    assert len({token for ids in out.ids for token in ids}) > 50
    assert model.generation_config is original


@pytest.mark.parametrize(("temperature", "share"), [(0.5, 0.982014), (1.0, 0.880797), (2.0, 0.731059), (2, 0.731059)])
def test_the_temperature_divides_the_logits(engine, temperature, share):
    # logits 2 and 0 for ids 10 and 11: 1 / (1 + e^(-2 / T)); four standard errors of 2000 draws are at most .04
    two = torch.full((256,), -1e9).scatter(0, torch.tensor([10, 11]), torch.tensor([2.0, 0.0]))
    model = with_logits(helpers.tiny_llama(), lambda last: two.expand(len(last), -1))
    out = draw(engine, model, [(5,)], [500], max_new_tokens=4, temperature=temperature)
    assert Counter(token for ids in out.ids for token in ids)[10] / 2000 == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("knobs", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str)
def test_each_knob_reaches_the_sampler(engine, knobs):
    model = helpers.tiny_llama()
    expected = greedy(engine, model)
    assert draw(engine, model, num_samples=[1] * 3, **knobs).ids == expected
    assert draw(engine, model, num_samples=[1] * 3).ids != expected


def test_a_repetition_penalty_reaches_the_sampler(engine):
    model = with_logits(
        helpers.tiny_llama(), lambda last: torch.zeros(len(last), 256).index_fill(1, torch.arange(9), 20.0)
    )
    often = draw(engine, model, [(100,)], [1], max_new_tokens=9, eos_token_ids=())
    never = draw(engine, model, [(100,)], [1], max_new_tokens=9, eos_token_ids=(), repetition_penalty=100.0)
    assert len(set(often.ids[0])) < 9 and sorted(never.ids[0]) == list(range(9))


def test_an_unknown_extra_argument_is_refused(engine):
    with pytest.raises((ValueError, TypeError), match="num_beems"):
        draw(engine, helpers.tiny_llama(), extra={"num_beems": 2})


def test_extra_arguments_come_to_every_call_unchanged(engine):
    extra = {"suppress_tokens": [token for token in range(256) if token != 77]}
    model = helpers.tiny_llama()
    generator = engine(lambda: model)
    params = sampling(extra=extra)
    for _ in range(3):
        assert set(generator.generate([(5,)], [2], params, seed=0).ids) == {(77,) * 5}
    assert len(extra["suppress_tokens"]) == 255


# --- random numbers ---------------------------------------------------------------------------------------------------


def test_the_seed_alone_decides(engine):
    model = helpers.tiny_llama()
    first = draw(engine, model, seed=7)
    torch.manual_seed(123)
    state = torch.get_rng_state()
    assert draw(engine, model, seed=7) == first
    assert torch.equal(torch.get_rng_state(), state)
    assert len({draw(engine, model, seed=seed).ids for seed in (0, 1, 7, 2**31 + 5)}) == 4
    assert len(set(first.ids)) == 6  # the completions of one prompt differ


# --- the policy's own state -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [None, RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("name", MODELS)
def test_everything_is_as_before_whether_generation_returns_raises_or_is_interrupted(engine, name, failure):
    model = unusual(name)
    before = state_of(model)
    calls = watch(model)

    def fail_late(module, args, kwargs):
        if len(calls) == 3:
            assert state_of(model)["modes"] != before["modes"]
            raise failure("out of memory, say")

    if failure is not None:
        model.register_forward_pre_hook(fail_late, with_kwargs=True)
    generator = engine(lambda: model, lambda: torch.autocast("cpu", torch.bfloat16))
    with pytest.raises(failure, match="out of memory") if failure else contextlib.nullcontext():
        generator.generate(PROMPTS, [2] * 3, sampling(eos_token_ids=()), seed=0)
    assert len(calls) == (3 if failure else 5)
    assert state_of(model) == before


@pytest.mark.parametrize("name", MODELS)
def test_inside_the_policy_evaluates_without_dropout_checkpointing_or_gradients_and_with_its_cache(engine, name):
    model = unusual(name)
    inside: list[dict] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: inside.append({**state_of(model), "width": kwargs["input_ids"].shape[1]}),
        with_kwargs=True,
    )
    draw(engine, model, eos_token_ids=())
    assert [call["width"] for call in inside] == [7, 1, 1, 1, 1]  # the longest prompt, then one token at a time
    for call in inside:
        assert not any(call["modes"]) and not any(call["checkpointing"])
        assert call["use_cache"] is True and call["gradients"][0] is False


@pytest.mark.parametrize("name", MODELS)
def test_a_policy_in_training_mode_says_what_it_says_in_eval_mode(engine, name):
    assert draw(engine, unusual(name)) == draw(engine, MODELS[name]())


def test_the_policy_is_asked_for_anew_each_time(engine):
    models = [helpers.tiny_llama(seed=1), helpers.tiny_llama(seed=2)]
    expected = [draw(engine, model).ids for model in models]
    generator = engine(lambda: models[0])
    assert generator.generate(PROMPTS, [2] * 3, sampling(), seed=0).ids == expected[0]
    models.reverse()
    assert generator.generate(PROMPTS, [2] * 3, sampling(), seed=0).ids == expected[1]


def test_one_autocast_context_covers_the_whole_call(engine):
    entered = []

    @contextlib.contextmanager
    def autocast():
        entered.append(len(calls))
        with torch.autocast("cpu", torch.bfloat16):
            yield

    model = helpers.tiny_llama()
    calls = watch(model)
    dtypes = []
    model.register_forward_hook(lambda module, args, out: dtypes.append(out.logits.dtype))
    engine(lambda: model, autocast).generate(PROMPTS, [1] * 3, sampling(eos_token_ids=()), seed=0)
    assert entered == [0] and len(calls) == 5
    assert set(dtypes) == {torch.bfloat16}
