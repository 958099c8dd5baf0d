from __future__ import annotations

import pytest

from grpo_trainer.rewards import REWARDS
from grpo_trainer.rewards.repetition import repetition


@pytest.mark.parametrize(
    ("tokens", "ngram", "reward"),
    [
        ([1, 2, 3, 4], 2, 0.0),  # three pairs, all different
        ([5, 5, 5, 5, 5], 2, -0.75),  # four pairs, one kind: 1 - 1/4
        ([1, 2, 1, 2, 1, 2], 2, -0.6),  # five pairs, two kinds: 1 - 2/5
        ([1, 2, 3, 1, 2, 3], 3, -0.25),  # four triples, three kinds
        ([1, 1], 3, 0.0),  # too short
        ([], 1, 0.0),
        ([7, 7, 8], 1, -1 / 3),
    ],
)
def test_the_share_of_repeated_ngrams(tokens, ngram, reward):
    assert repetition([""], [tokens], ngram=ngram) == [pytest.approx(reward)]
    assert repetition([""], [tokens], ngram=ngram, max_penalty=-0.5) == [pytest.approx(reward / 2)]


def test_words_and_one_value_for_each_completion_however_short():
    texts = ["", "a", "a a a a a a", "A a, a"]
    assert repetition(texts, [[]] * 4, ngram=3, unit="words") == [0.0, 0.0, -0.75, 0.0]
    chat = [[{"role": "assistant", "content": "yes Yes yes"}]]
    assert repetition(chat, [[]], ngram=1, unit="words") == [pytest.approx(-2 / 3)]


@pytest.mark.parametrize("wrong", [{"ngram": 0}, {"max_penalty": 0.1}, {"unit": "letters"}])
def test_what_is_out_of_range_is_refused(wrong):
    with pytest.raises(ValueError, match="repetition: ngram="):
        repetition([""], [[1]], **wrong)
    assert REWARDS["repetition"] is repetition
