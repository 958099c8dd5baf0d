from __future__ import annotations

import pytest

from grpo_trainer.generation.hf import HFGenerator, check_extra, generation_config
from tests import helpers
from tests.generation.doubles import PROMPTS, sampling


def draw(model, **knobs):
    return HFGenerator(lambda: model).generate(PROMPTS, [2] * 3, sampling(), seed=5, **knobs)


def test_it_captures_no_log_probs_and_has_one_stream_for_all_rows_that_the_first_one_starts():
    model = helpers.tiny_llama()
    assert draw(model).sampling_logprobs is None
    first, second = ([(prompt, i) for i in range(6)] for prompt in (0, 9))
    assert draw(model, row_ids=first) == draw(model, row_ids=first) != draw(model, row_ids=second)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("max_length", "set max_completion_length"), ("temperature", "set temperature"), ("num_beams", "not a sample")],
)
def test_what_would_change_what_comes_back_is_refused_with_what_to_set_instead(name, remedy):
    with pytest.raises(ValueError, match=f"{name}.*{remedy}"):
        check_extra({name: 2})


def test_a_private_field_is_no_argument():
    with pytest.raises(ValueError, match="_from_model_config"):
        check_extra({"_from_model_config": True})


def test_greedy_decoding_asks_for_nothing_that_only_sampling_uses(caplog):
    config = generation_config(sampling(temperature=0.0, top_k=5, top_p=0.5, min_p=0.1))
    assert (config.do_sample, config.top_k, config.top_p, config.min_p) == (False, None, None, None)
    config = generation_config(sampling(temperature=1, top_k=5))
    assert (config.do_sample, config.temperature, config.top_k) == (True, 1.0, 5)
