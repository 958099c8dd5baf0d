from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from transformers import GenerationConfig

from grpo_trainer.generation.group import GroupGenerator
from grpo_trainer.generation.randomness import row_keys, uniforms
from grpo_trainer.generation.sampling import OCCURRENCE, SCORES_ONLY, SEQUENCE, draw_tokens, pick_tokens, rules_of
from grpo_trainer.generation.state import inference_state
from tests import helpers
from tests.generation import families
from tests.generation.doubles import always, sampling

LOGITS = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0])


def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, float]:
    """The statistic, and what it exceeds once in about a thousand million times (Wilson and Hilferty)."""
    expected = probabilities.double() * counts.sum()
    assert not counts[expected == 0].any(), "what cannot be drawn was drawn"
    some = expected > 0
    assert expected[some].min() > 5, "too few draws for the test"
    freedom = int(some.sum()) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 6 * math.sqrt(2 / (9 * freedom))) ** 3 if freedom else 1e-9
    return ((counts - expected)[some] ** 2 / expected[some]).sum().item(), bound


# --- one draw ---------------------------------------------------------------------------------------------------------


def test_the_token_is_the_first_whose_cumulative_probability_exceeds_the_number():
    scores = torch.tensor([[0.1, 0.2, 0.0, 0.7]]).log()  # nothing for token 2
    for u, token in [(1e-12, 0), (0.0999, 0), (0.1001, 1), (0.2999, 1), (0.3001, 3), (1 - 2**-53, 3)]:
        draw = draw_tokens(scores, torch.tensor([u], dtype=torch.float64))
        assert draw.tokens.tolist() == [token]
        assert draw.logprobs.item() == pytest.approx(math.log([0.1, 0.2, 0.0, 0.7][token]), abs=1e-6)


def test_a_number_on_the_edge_belongs_to_the_token_above_it():
    assert draw_tokens(torch.zeros(1, 2), torch.tensor([0.5], dtype=torch.float64)).tokens.tolist() == [1]


@pytest.mark.parametrize("vocabulary", [1, 2, 255, 256, 257, 1000])
def test_any_size_of_vocabulary_is_drawn_by_inverting_the_cumulative_sums(vocabulary):
    scores = 3 * torch.randn(5, vocabulary)
    scores[1, : vocabulary // 2] = -math.inf
    sums = scores.double().softmax(-1).cumsum(-1)
    for u in torch.linspace(0.0005, 0.9995, 101, dtype=torch.float64):
        draw = draw_tokens(scores, u.expand(5))
        expected = torch.searchsorted(sums, u.expand(5, 1).contiguous(), right=True)[:, 0].clamp(max=vocabulary - 1)
        assert torch.equal(draw.tokens, expected)
        exact = scores.double().log_softmax(-1).gather(1, expected[:, None])[:, 0]
        torch.testing.assert_close(draw.logprobs, exact, rtol=0, atol=1e-6)


def test_the_ends_of_the_interval_never_reach_what_has_no_probability():
    scores = torch.full((1, 600), -math.inf)
    scores[0, [300, 310]] = torch.tensor([0.0, -30.0])
    for u in (2.0**-53, 0.5, 1 - 2.0**-53):
        assert draw_tokens(scores, torch.tensor([u], dtype=torch.float64)).tokens.item() in (300, 310)


def test_unlikely_tokens_keep_their_probability_in_a_large_vocabulary():
    """One token has half of the mass, 100,000 share the rest: float32 sums would lose a good part of it."""
    count, vocabulary = 1000, 100_001
    scores = torch.zeros(vocabulary)
    scores[50_000] = math.log(vocabulary - 1)
    u = uniforms(row_keys(3, [(0, i) for i in range(count)]), torch.zeros(count, dtype=torch.long))
    tokens = torch.cat([draw_tokens(scores.expand(250, -1), part).tokens for part in u.split(250)])
    tail = tokens[tokens != 50_000]
    assert abs(len(tail) / count - 0.5) < 4 * 0.5 / math.sqrt(count)
    counts = torch.histc(tail.float(), bins=10, min=0, max=vocabulary)
    statistic, bound = chi_square(counts, torch.full((10,), 0.1))
    assert statistic < bound


def test_scores_that_are_no_numbers_show_in_the_log_prob():
    scores = torch.zeros(3, 10)
    scores[0, 4] = math.nan
    scores[1] = -math.inf
    assert draw_tokens(scores, torch.full((3,), 0.5, dtype=torch.float64)).logprobs.isnan().tolist() == [
        True,
        True,
        False,
    ]
    assert pick_tokens(scores).logprobs.isnan().tolist() == [True, True, False]


def test_the_likeliest_token_comes_with_its_log_prob():
    draw = pick_tokens(torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]).log())
    assert draw.tokens.tolist() == [1, 0]
    assert draw.logprobs.tolist() == pytest.approx([math.log(0.5), math.log(0.6)])


# --- the distribution of what an engine draws -------------------------------------------------------------------------


def softmax(logits, keep=None):
    p = torch.tensor(logits, dtype=torch.float64).exp()
    if keep is not None:
        p[[i for i in range(len(p)) if i not in keep]] = 0
    return p / p.sum()


# logits 2 1.5 1 .5 0 -.5 -1 -3, probabilities .405 .245 .149 .090 .055 .033 .020 .003
BASE = LOGITS.tolist()
DRAWS = 8000
OPTIONS = {
    "plain": ({}, softmax(BASE)),
    "temperature below 1": ({"temperature": 0.8}, softmax([x / 0.8 for x in BASE])),
    "temperature above 1": ({"temperature": 2.0}, softmax([x / 2 for x in BASE])),
    "top_k": ({"top_k": 3}, softmax(BASE, [0, 1, 2])),
    # cumulative .405 .650 .799 .889: four tokens are the fewest that reach .85
    "top_p": ({"top_p": 0.85}, softmax(BASE, [0, 1, 2, 3])),
    # a tenth of the likeliest is e^(2 - 2.303): logits above -0.303
    "min_p": ({"min_p": 0.1}, softmax(BASE, [0, 1, 2, 3, 4])),
    # the temperature first: logits 4 3 2 of the three likeliest are .665 .245 .090, and two of them reach .7
    "all at once": ({"temperature": 0.5, "top_k": 3, "top_p": 0.7}, softmax([2 * x for x in BASE], [0, 1])),
    # the prompt is 1 5: a positive score is divided, a negative one multiplied
    "repetition_penalty": ({"repetition_penalty": 2.0}, softmax([2.0, 0.75, 1.0, 0.5, 0.0, -1.0, -1.0, -3.0])),
    "suppress_tokens": ({"extra": {"suppress_tokens": [0, 2]}}, softmax(BASE, [1, 3, 4, 5, 6, 7])),
    # 1 may not follow 5, and 5 came last
    "bad_words_ids": ({"extra": {"bad_words_ids": [[0], [5, 1], [3, 2]]}}, softmax(BASE, [2, 3, 4, 5, 6, 7])),
    "sequence_bias": ({"extra": {"sequence_bias": [[[3], 1.0]]}}, softmax([*BASE[:3], 1.5, *BASE[4:]])),
    "epsilon_cutoff": ({"extra": {"epsilon_cutoff": 0.05}}, softmax(BASE, [0, 1, 2, 3, 4])),
    "end not yet": ({"extra": {"min_new_tokens": 1}, "eos_token_ids": (0, 4)}, softmax(BASE, [1, 2, 3, 5, 6, 7])),
    "forced end": ({"extra": {"forced_eos_token_id": 6}}, softmax(BASE, [6])),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_tokens_are_drawn_with_the_exact_probabilities(option):
    knobs, probabilities = OPTIONS[option]
    model = always(LOGITS)
    params = sampling(**{"max_new_tokens": 1, "eos_token_ids": (), **knobs})
    out = GroupGenerator(lambda: model).generate([(1, 5)], [DRAWS], params, seed=1)
    counts = torch.zeros(len(BASE))
    for (token,), count in Counter(out.ids).items():
        counts[token] = count
    statistic, bound = chi_square(counts, probabilities)
    assert statistic < bound
    for (token,), (logprob,) in dict(zip(out.ids, out.sampling_logprobs, strict=True)).items():
        assert logprob == pytest.approx(math.log(probabilities[token]), abs=1e-5)


# --- what generate would have applied ---------------------------------------------------------------------------------

PROCESSORS = {
    "repetition_penalty": {"repetition_penalty": 1.7},
    "no_repeat_ngram_size": {"extra": {"no_repeat_ngram_size": 2}},
    "bad_words_ids": {"extra": {"bad_words_ids": [[7], [30, 31], [3, 4, 5], [81]]}},
    "sequence_bias": {"extra": {"sequence_bias": [[[20], 3.0], [[20, 21], 5.0], [[8, 9], -4.0]]}},
    "min_new_tokens": {"extra": {"min_new_tokens": 6}},
    "min_length": {"extra": {"min_length": 10}},
    "forced_eos_token_id": {"extra": {"forced_eos_token_id": 100}},
    "forced_bos_token_id": {"extra": {"forced_bos_token_id": 99}},
    "exponential_decay": {"extra": {"exponential_decay_length_penalty": (3, 1.3)}},
    "suppress_tokens": {"extra": {"suppress_tokens": [*range(0, 128, 3)]}},
    "begin_suppress_tokens": {"extra": {"begin_suppress_tokens": [*range(0, 128, 2)]}},
    "remove_invalid_values": {"extra": {"remove_invalid_values": True, "renormalize_logits": True}},
    "several": {"repetition_penalty": 1.3, "extra": {"no_repeat_ngram_size": 3, "min_new_tokens": 3}},
}
PROMPTS = [(5, 6, 7, 5), (8, 9, 10, 11, 12, 13, 14), (17,), (20, 21, 20, 21, 20, 21)]


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_processor_does_to_a_row_in_flight_what_generate_does_to_the_row_alone(name):
    """Token for token, while rows of other lengths come and go."""
    model = families.family("llama", seed=2)
    params = sampling(
        **{"max_new_tokens": 12, "eos_token_ids": tuple(range(1, 128, 11)), "temperature": 0.0, **PROCESSORS[name]}
    )
    config = families.greedy_config(params)
    expected = [families.generate_alone(model, prompt, config) for prompt in PROMPTS]
    for room in (None, 50):
        out = GroupGenerator(lambda: model, max_cache_tokens=room).generate(PROMPTS, [1, 2, 1, 2], params, seed=0)
        assert out.ids == tuple(expected[i] for i in (0, 1, 1, 2, 3, 3))


@pytest.mark.parametrize(
    "knobs",
    [
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"typical_p": 0.5},
        {"epsilon_cutoff": 0.01},
        {"eta_cutoff": 0.01},
        {"top_h": 0.4},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4},
    ],
    ids=lambda knobs: "+".join(knobs),
)
def test_the_log_prob_of_each_token_is_the_one_under_generates_own_scores(knobs):
    model = families.family("llama", seed=2)
    own = {k: v for k, v in knobs.items() if k in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
    params = sampling(max_new_tokens=6, eos_token_ids=(), **own, extra={k: v for k, v in knobs.items() if k not in own})
    out = GroupGenerator(lambda: model).generate(PROMPTS, [2] * 4, params, seed=3)
    for row, (ids, logprobs) in enumerate(zip(out.ids, out.sampling_logprobs, strict=True)):
        prompt = list(PROMPTS[row // 2])
        for t, token in enumerate(ids):
            scores = families.next_scores(model, prompt + list(ids[:t]), params)
            assert logprobs[t] == pytest.approx(scores.log_softmax(-1)[token].item(), abs=1e-5)


def test_every_processor_that_generate_can_build_is_known_or_leads_to_generate():
    """The ones of encoder-decoders, of other modalities, and that need what ``generation_kwargs`` cannot hold aside."""
    import inspect

    from transformers.generation import logits_process

    theirs = {
        name
        for name, value in vars(logits_process).items()
        if inspect.isclass(value) and issubclass(value, logits_process.LogitsProcessor)
    }
    ours = {kind.__name__ for kind in (*SCORES_ONLY, *OCCURRENCE, *SEQUENCE)}
    assert ours <= theirs
    others = ("Whisper", "Dia", "Bark", "Alternating", "Encoder", "SynthID", "Watermark", "Classifier", "Unbatched")
    rest = {name for name in theirs - ours if not name.startswith(others)}
    assert rest <= {"LogitsProcessor", "PrefixConstrainedLogitsProcessor"}


def test_rules_come_from_generate_itself_in_its_order():
    model = helpers.tiny_llama()
    config = GenerationConfig(
        do_sample=True, temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, max_new_tokens=3,
        eos_token_id=[1], pad_token_id=2, max_time=5.0, no_repeat_ngram_size=2,
    )  # fmt: skip
    with inference_state(model):
        rules = rules_of(model, config, 7, torch.device("cpu"))
    assert [type(p).__name__ for p in rules.processors] == [
        "RepetitionPenaltyLogitsProcessor",
        "NoRepeatNGramLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
    ]
    assert {type(c).__name__ for c in rules.criteria} == {"MaxLengthCriteria", "MaxTimeCriteria", "EosTokenCriteria"}
