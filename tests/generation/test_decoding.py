"""Greedy decoding is, token for token, that of ``generate``, in float32 and for every family."""

from __future__ import annotations

import contextlib

import pytest
import torch

from grpo_trainer.generation.cache import RowCache
from grpo_trainer.generation.group import GroupGenerator
from grpo_trainer.generation.hf import HFGenerator
from tests import helpers
from tests.generation import families
from tests.generation.doubles import always, counting, sampling, watch

PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (17,), tuple(range(20, 50)), (40, 41), tuple(range(60, 73))]
GROUPS = [3, 1, 2, 2, 1, 2]
ENDS = tuple(range(1, families.VOCAB_SIZE, 9))  # one token in nine: some rows end at once, some never


def greedy(model, room=None, prompts=PROMPTS, groups=GROUPS, **knobs):
    params = sampling(**{"max_new_tokens": 20, "eos_token_ids": ENDS, "temperature": 0.0, **knobs})
    return GroupGenerator(lambda: model, max_cache_tokens=room).generate(prompts, groups, params, seed=0)


@pytest.mark.parametrize("name", families.DENSE)
def test_every_family_says_what_generate_says_to_each_prompt_alone(name):
    model = families.family(name)
    config = families.greedy_config(sampling(max_new_tokens=20, eos_token_ids=ENDS))
    alone = [families.generate_alone(model, prompt, config) for prompt in PROMPTS]
    assert len({len(ids) for ids in alone}) > 1 or name.startswith("gemma"), "no row ends before the others"
    expected = tuple(ids for ids, n in zip(alone, GROUPS, strict=True) for _ in range(n))
    # all together, one by one, and with places that are refilled by shorter and by longer prompts
    for room in (None, 50, 100, 150, 200):
        assert greedy(model, room).ids == expected


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_a_sliding_window_slides_over_prompt_and_completion(name):
    """With a window as wide as the context the answers are others: the window is really in force."""
    assert greedy(families.family(name)).ids != greedy(families.family(name, sliding_window=200)).ids


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_either_attention_of_transformers_will_do(implementation):
    model = families.family("qwen3")
    expected = greedy(model).ids
    model.set_attn_implementation(implementation)
    assert greedy(model, 100).ids == expected


def test_an_adapter_takes_part():
    import peft

    model = families.family("llama")
    plain = greedy(model).ids
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", init_lora_weights=False))
    with adapted.disable_adapter():
        assert greedy(adapted, 100).ids == plain
    params = sampling(max_new_tokens=20, eos_token_ids=ENDS, temperature=0.0)
    expected = HFGenerator(lambda: adapted).generate(PROMPTS, GROUPS, params, seed=0).ids
    assert greedy(adapted, 100).ids == expected != plain


@pytest.mark.slow
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_with_an_adapter_says_what_generate_says(tmp_path, bits):
    import peft
    import transformers

    families.family("llama", hidden_size=64, intermediate_size=128, head_dim=16).save_pretrained(tmp_path)
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=bits == 4, load_in_8bit=bits == 8, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=settings, dtype=torch.float32
    )
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    params = sampling(max_new_tokens=8, eos_token_ids=ENDS, temperature=0.0)
    expected = HFGenerator(lambda: adapted).generate(PROMPTS, GROUPS, params, seed=0).ids
    before = {name: (id(p), p.dtype, p.data_ptr()) for name, p in adapted.named_parameters()}
    assert greedy(adapted, max_new_tokens=8).ids == expected
    assert {name: (id(p), p.dtype, p.data_ptr()) for name, p in adapted.named_parameters()} == before


# --- how often the model is called, and with what ---------------------------------------------------------------------


def test_a_prompt_is_prefilled_once_and_a_row_that_ended_is_not_fed():
    model = families.family("llama")
    seen = watch(model)
    out = greedy(model)
    shapes = [tuple(call["input_ids"].shape) for call in seen]
    prefills = [shape for shape in shapes if shape[1] > 1]
    assert sum(rows for rows, _ in prefills) == len(PROMPTS)
    steps = [rows for rows, columns in shapes if columns == 1]
    assert steps == sorted(steps, reverse=True)
    assert sum(steps) == sum(len(ids) - 1 for ids in out.ids)  # the last token of a row is fed to nobody


@pytest.mark.parametrize("room", [50, 120, 200])
def test_the_cache_never_holds_more_tokens_than_it_may(room):
    model = families.family("llama")
    seen = watch(model)
    out = greedy(model, room)
    for call in seen:
        cache = call.get("cache", call.get("past_key_values"))
        if call["input_ids"].shape[1] == 1:
            assert call["input_ids"].shape[0] * cache.get_seq_length() <= room
    assert len(out) == sum(GROUPS)


def test_a_group_larger_than_the_cache_is_drawn_in_parts():
    out = greedy(counting(), 50, [(9, 10, 11)], [40], eos_token_ids=(20,))
    assert out.ids == (tuple(range(12, 21)),) * 40 and all(out.finished)


# --- the ends of what can be asked for --------------------------------------------------------------------------------


def test_every_row_ends_at_its_first_token():
    model = counting()
    seen = watch(model)
    out = greedy(model, None, [(9,), (5, 19)], [2, 3], eos_token_ids=(10, 20))
    assert out.ids == ((10,),) * 2 + ((20,),) * 3 and all(out.finished)
    assert len(seen) == 1


def test_some_rows_end_at_their_first_token_and_places_are_refilled_with_others():
    out = greedy(counting(), 30, [(9,), (5, 18), (19,)], [2, 3, 2], eos_token_ids=(10, 21), max_new_tokens=4)
    assert out.ids == ((10,),) * 2 + ((19, 20, 21),) * 3 + ((20, 21),) * 2


def test_no_row_ends():
    out = greedy(counting(), None, [(9,), (50,)], [2, 1], eos_token_ids=(), max_new_tokens=3)
    assert out.ids == ((10, 11, 12),) * 2 + ((51, 52, 53),) and not any(out.finished)


def test_all_rows_end_at_once():
    out = greedy(counting(), None, [(9,), (5, 9)], [2, 2], eos_token_ids=(12,))
    assert out.ids == ((10, 11, 12),) * 4 and all(out.finished)


@pytest.mark.parametrize("room", [None, 8])
def test_a_limit_of_one_token(room):
    model = counting()
    seen = watch(model)
    out = greedy(model, room, [(9,), (5, 6, 7)], [2, 2], eos_token_ids=(10,), max_new_tokens=1)
    assert out.ids == ((10,),) * 2 + ((8,),) * 2 and out.finished == (True, True, False, False)
    assert all(call["input_ids"].shape[1] > 1 or call["input_ids"].item() == 9 for call in seen)  # prefills alone


def test_a_prompt_and_its_completion_fill_the_whole_context():
    model = helpers.tiny_gpt2(n_positions=32)  # a position beyond would be an index out of range
    prompt = tuple(range(40, 68))
    params = sampling(max_new_tokens=4, eos_token_ids=(), temperature=0.0)
    expected = HFGenerator(lambda: model).generate([prompt, (5,)], [2, 1], params, seed=0).ids
    assert GroupGenerator(lambda: model).generate([prompt, (5,)], [2, 1], params, seed=0).ids == expected


def test_scores_that_are_no_numbers_are_an_error_and_name_the_row():
    model = always(torch.full((8,), float("nan")))
    with pytest.raises(ValueError, match=r"token 0 of completion 0 of prompt 0 cannot be drawn: .* not numbers"):
        GroupGenerator(lambda: model).generate([(5,)], [2], sampling(), seed=0)
    extra = {"suppress_tokens": list(range(8))}
    with pytest.raises(ValueError, match="every token is forbidden"):
        GroupGenerator(lambda: always(torch.zeros(8))).generate([(5,)], [1], sampling(extra=extra), seed=0)


def test_rows_that_are_out_of_time_are_cut():
    out = greedy(counting(), None, [(9,), (50,)], [2, 1], eos_token_ids=(10,), extra={"max_time": 0.0})
    assert out.ids == ((10,),) * 2 + ((51,),) and out.finished == (True, True, False)


# --- mixed precision --------------------------------------------------------------------------------------------------


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_under_autocast_the_log_probs_are_those_of_autocasts_own_forward(name):
    model = families.family(name)
    model.requires_grad_(name == "llama")
    params = sampling(max_new_tokens=12, eos_token_ids=())
    out = GroupGenerator(lambda: model, bfloat16).generate(PROMPTS, [2] * 6, params, seed=1)
    errors, spread = [], []
    for row, (ids, logprobs) in enumerate(zip(out.ids, out.sampling_logprobs, strict=True)):
        prompt = PROMPTS[row // 2]
        tokens = torch.tensor([[*prompt, *ids]])
        with torch.no_grad():
            exact = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            with bfloat16():
                theirs = model(tokens).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        index = torch.tensor(ids)[:, None]
        errors.append(torch.tensor(logprobs) - exact.gather(1, index)[:, 0])
        spread.append((theirs - exact).gather(1, index)[:, 0])
    # no further from float32 than autocast itself, and by bfloat16's rounding, not by more
    assert torch.cat(errors).std() < 1.3 * torch.cat(spread).std() < 0.3


def test_keys_are_kept_in_the_type_that_attention_casts_them_to():
    model = families.family("llama")
    dtypes = set()

    def look(module, args, kwargs, out):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(cache, RowCache):
            dtypes.update(buffer.dtype for layer in cache.layers for buffer in layer._buffers)

    model.register_forward_hook(look, with_kwargs=True)
    for autocast, dtype in [(contextlib.nullcontext, torch.float32), (bfloat16, torch.bfloat16)]:
        dtypes.clear()
        GroupGenerator(lambda: model, autocast).generate(PROMPTS, [1] * 6, sampling(), seed=0)
        assert dtypes == {dtype}
