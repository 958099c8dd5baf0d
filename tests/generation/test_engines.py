from __future__ import annotations

import logging

import pytest

from grpo_trainer.generation.base import ENGINES
from grpo_trainer.generation.continuous import ContinuousGenerator
from grpo_trainer.generation.engines import AutoGenerator, make_generator
from grpo_trainer.generation.group import GroupGenerator
from grpo_trainer.generation.hf import HFGenerator
from tests import helpers
from tests.generation.doubles import PROMPTS, sampling


def draw(engine, model, **knobs):
    return make_generator(engine, lambda: model).generate(PROMPTS, [2] * 3, sampling(**knobs), seed=4)


def test_each_name_is_an_engine():
    kinds = [type(make_generator(name, lambda: None)) for name in ENGINES]
    assert kinds == [AutoGenerator, GroupGenerator, HFGenerator, ContinuousGenerator]
    with pytest.raises(ValueError, match=r"generation_engine is 'groop'\. Did you mean 'group'\?"):
        make_generator("groop", lambda: None)


def test_auto_is_the_group_engine_where_that_can_draw(caplog):
    model = helpers.tiny_llama()
    assert draw("auto", model) == draw("group", model)
    assert draw("auto", model).sampling_logprobs is not None and caplog.text == ""


def test_auto_is_generate_where_it_cannot_and_says_why_once(caplog):
    model = helpers.tiny_llama()
    static = {"extra": {"cache_implementation": "static"}}
    expected = draw("generate", model, **static)
    generator = make_generator("auto", lambda: model)
    with caplog.at_level(logging.WARNING, logger="grpo_trainer"):
        for _ in range(3):
            assert generator.generate(PROMPTS, [2] * 3, sampling(**static), seed=4) == expected
        assert caplog.messages == [
            "completions are drawn with generate of transformers, slower than the group engine, because "
            "cache_implementation='static' asks for it"
        ]
        generator.generate(PROMPTS, [2] * 3, sampling(extra={"use_cache": False}), seed=4)
    assert len(caplog.messages) == 2  # another reason
    assert generator.generate(PROMPTS, [2] * 3, sampling(), seed=4) == draw("group", model)


def test_the_room_in_the_cache_reaches_the_group_engine():
    for name in ("auto", "group"):
        with pytest.raises(ValueError, match="max_cache_tokens=5 has no room"):
            make_generator(name, lambda: helpers.tiny_llama(), max_cache_tokens=5).generate(
                PROMPTS, [2] * 3, sampling(), seed=0
            )
