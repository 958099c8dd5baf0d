from __future__ import annotations

import gc
import weakref

import pytest
import torch

from grpo_trainer.generation.cache import RowCache
from grpo_trainer.generation.group import GroupGenerator
from tests import helpers
from tests.generation import families
from tests.generation.doubles import MODELS, sampling, watch

PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (17,), tuple(range(20, 50))]
ENDS = tuple(range(1, families.VOCAB_SIZE, 17))


def draw(model, prompts=PROMPTS, groups=(3, 2, 4, 2), *, room=None, seed=0, row_ids=None, **knobs):
    params = sampling(**{"max_new_tokens": 12, "eos_token_ids": ENDS, **knobs})
    generator = GroupGenerator(lambda: model, max_cache_tokens=room)
    return generator.generate(prompts, groups, params, seed=seed, row_ids=row_ids)


def by_row(out, groups) -> list[list[tuple[int, ...]]]:
    rows = iter(out.ids)
    return [[next(rows) for _ in range(n)] for n in groups]


# --- random numbers belong to rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("knobs", [{}, {"temperature": 0.7, "top_k": 20}, {"repetition_penalty": 1.3}], ids=str)
def test_completions_do_not_depend_on_how_many_are_drawn_together(name, knobs):
    model = MODELS[name]()
    whole = draw(model, **knobs)
    assert len({len(ids) for ids in whole.ids}) > 2
    for room in (42, 60, 90, 130, 400):
        assert draw(model, room=room, **knobs).ids == whole.ids


def test_completions_do_not_depend_on_the_order_of_the_prompts():
    model = helpers.tiny_llama()
    groups = [3, 2, 4, 2]
    whole = by_row(draw(model, groups=groups), groups)
    order = [2, 0, 3, 1]
    ids = [(p, c) for p in order for c in range(groups[p])]
    moved = draw(model, [PROMPTS[p] for p in order], [groups[p] for p in order], row_ids=ids)
    assert by_row(moved, [groups[p] for p in order]) == [whole[p] for p in order]


def test_processes_that_share_the_rows_draw_what_one_process_draws():
    """Groups are cut in the middle, as a rollout's layout may cut them."""
    model = helpers.tiny_llama()
    groups = [3, 2, 4, 2]
    whole = draw(model, groups=groups).ids
    rows = [(p, c) for p, n in enumerate(groups) for c in range(n)]
    for world_size in (2, 3, 11):
        for rank in range(world_size):
            mine = rows[rank::world_size]
            prompts = sorted({p for p, _ in mine})
            counts = [sum(p == q for q, _ in mine) for p in prompts]
            part = draw(model, [PROMPTS[p] for p in prompts], counts, row_ids=mine).ids
            assert part == whole[rank::world_size]


def test_more_completions_of_a_prompt_leave_the_others_as_they_are():
    model = helpers.tiny_llama()
    few, many = by_row(draw(model, groups=[1] * 4), [1] * 4), by_row(draw(model, groups=[5] * 4), [5] * 4)
    assert [rows[0] for rows in many] == [rows[0] for rows in few]
    assert all(len(set(rows)) == 5 for rows in many)


def test_the_rows_identity_and_the_seed_decide():
    model = helpers.tiny_llama()
    ids = [(p, c) for p, n in enumerate((3, 2, 4, 2)) for c in range(n)]
    first = draw(model)
    assert draw(model, row_ids=ids) == first
    assert draw(model, row_ids=[(p + 100, c) for p, c in ids]).ids != first.ids
    assert draw(model, seed=1).ids != first.ids
    with pytest.raises(ValueError, match="3 row_ids for 11 completions"):
        draw(model, row_ids=ids[:3])


def test_the_process_own_random_state_is_neither_used_nor_moved():
    model = helpers.tiny_llama()
    first = draw(model)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert draw(model) == first and torch.equal(torch.get_rng_state(), state)


# --- captured log-probs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "room"), [(1.0, None), (0.6, 60)])
@pytest.mark.parametrize("name", families.DENSE)
def test_captured_log_probs_are_those_of_a_fresh_forward_pass(name, temperature, room):
    model = families.family(name)
    out = draw(model, room=room, temperature=temperature)
    rows = [prompt for prompt, n in zip(PROMPTS, (3, 2, 4, 2), strict=True) for _ in range(n)]
    assert [len(x) for x in out.sampling_logprobs] == [len(x) for x in out.ids]
    for prompt, ids, logprobs in zip(rows, out.ids, out.sampling_logprobs, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        fresh = (logits.double() / temperature).log_softmax(-1)
        for t, token in enumerate(ids):
            assert logprobs[t] == pytest.approx(fresh[t, token].item(), abs=1e-5)


def test_greedy_decoding_captures_the_log_probs_of_the_likeliest_tokens():
    model = helpers.tiny_llama()
    out = draw(model, [(5, 6)], [1], temperature=0.0)
    with torch.no_grad():
        fresh = model(torch.tensor([[5, 6, *out.ids[0]]])).logits[0, 1:-1].double().log_softmax(-1)
    assert list(out.sampling_logprobs[0]) == pytest.approx(fresh.amax(-1).tolist(), abs=1e-5)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_nothing_of_a_rollout_stays_in_memory():
    model = helpers.tiny_llama()
    caches: list[weakref.ref] = []

    def remember(module, args, kwargs):
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        if isinstance(cache, RowCache) and not any(ref() is cache for ref in caches):
            caches.append(weakref.ref(cache))

    model.register_forward_pre_hook(remember, with_kwargs=True)

    def held() -> int:
        gc.collect()
        tensors = {id(x): x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
        return sum(x.numel() * x.element_size() for x in tensors.values())

    draw(model, room=90)
    before = held()
    for seed in range(8):
        draw(model, room=90, seed=seed)
    assert held() == before
    assert len(caches) == 9 and not any(ref() is not None for ref in caches)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_nothing_of_an_interrupted_rollout_stays_in_memory(failure):
    model = helpers.tiny_llama()
    caches = []
    seen = []

    def fail(module, args, kwargs):
        seen.append(1)
        cache = kwargs.get("cache", kwargs.get("past_key_values"))
        caches.append(weakref.ref(cache))
        if len(seen) == 4:
            raise failure

    handle = model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(failure):
        draw(model)
    handle.remove()
    gc.collect()
    assert len(seen) == 4 and not any(ref() is not None for ref in caches)
    assert draw(model) == draw(helpers.tiny_llama())


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_cache_without_room_for_one_completion_is_refused():
    with pytest.raises(ValueError, match=r"max_cache_tokens=41 .* 30 tokens, max_completion_length is 12; .* 42"):
        draw(helpers.tiny_llama(), room=41)
    with pytest.raises(ValueError, match="max_cache_tokens is 0"):
        GroupGenerator(lambda: None, max_cache_tokens=0)


def test_the_default_is_room_for_one_completion_at_least(monkeypatch):
    monkeypatch.setattr("grpo_trainer.generation.group.default_cache_tokens", lambda policy, device: 1)
    model = helpers.tiny_llama()
    seen = watch(model)
    out = draw(model)
    assert max(call["input_ids"].shape[0] for call in seen) <= 42 // 13
    assert out.ids == draw(helpers.tiny_llama(), room=10_000).ids


def test_a_model_that_it_cannot_decode_is_refused_with_the_reason():
    model = families.build(
        "T5ForConditionalGeneration", vocab_size=64, d_model=16, d_ff=16, d_kv=8, num_heads=2, num_layers=1
    )
    with pytest.raises(ValueError, match=r"'group' cannot be used because .*has an encoder; .*='auto'"):
        draw(model)
    assert "has an encoder" in GroupGenerator(lambda: model).attempt([(5,)], [1], sampling(), seed=0)
