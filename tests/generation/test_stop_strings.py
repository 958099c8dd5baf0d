"""A stop string ends a completion with the token that completes it, under every engine alike."""

from __future__ import annotations

import pytest

from grpo_trainer.generation.base import Observer
from grpo_trainer.generation.engines import make_generator
from tests import helpers
from tests.generation.doubles import PROMPTS, counting, sampling

OWN = ["auto", "group", "generate"]
"""Continuous batching cannot, and says so."""


def letters(tokenizer, text):
    return tuple(tokenizer.convert_tokens_to_ids(list(text)))


def draw(engine, model, prompts, counts, **knobs):
    observer = knobs.pop("observer", None)
    tokenizer = helpers.tiny_tokenizer()
    drawing = sampling(temperature=0.0, tokenizer=tokenizer, **knobs)
    return make_generator(engine, lambda: model).generate(prompts, counts, drawing, seed=0, observer=observer)


@pytest.mark.parametrize("engine", OWN)
def test_a_completion_ends_where_the_string_is_complete(engine):
    """The model counts upwards, so after "a" it says "bcdef…"; the ids of letters follow each other."""
    tokenizer = helpers.tiny_tokenizer()
    start, far, near = (letters(tokenizer, c) for c in "amd")
    assert letters(tokenizer, "bc") == (start[0] + 1, start[0] + 2)
    got = draw(
        engine, counting(), [start, far, near], [2, 1, 1], extra={"stop_strings": ["de", "no"]}, max_new_tokens=6
    )
    # after "m" comes "no"; after "d" comes "e", which completes the "d" of the prompt, as generate has it
    expected = [letters(tokenizer, text) for text in ("bcde", "bcde", "no", "e")]
    assert list(got.ids) == expected
    assert got.finished == (True, True, True, True)


@pytest.mark.parametrize("engine", OWN)
def test_what_never_comes_changes_nothing(engine):
    model = helpers.tiny_llama()
    plain = draw(engine, model, PROMPTS, [2] * 3)
    assert draw(engine, model, PROMPTS, [2] * 3, extra={"stop_strings": "~~~~~~"}) == plain
    cut = draw(engine, counting(), [(20,)], [1], extra={"stop_strings": ["~~~~~~"]})
    assert cut.finished == (False,)


@pytest.mark.parametrize("engine", OWN)
def test_an_end_of_sequence_token_and_a_string_whichever_comes_first(engine):
    tokenizer = helpers.tiny_tokenizer()
    (a,) = letters(tokenizer, "a")
    got = draw(engine, counting(), [(a,)], [1], extra={"stop_strings": ["cd"]}, eos_token_ids=(a + 2,))
    assert got.ids == ((a + 1, a + 2),) and got.finished == (True,)  # "bc", c being an end
    got = draw(
        engine, counting(), [(a,)], [1], extra={"stop_strings": ["bc"]}, eos_token_ids=(a + 3,), pad_token_id=a + 3
    )
    assert got.ids == ((a + 1, a + 2),) and got.finished == (True,)  # the filler behind it is not part of it


class Notes(Observer):
    def __init__(self):
        self.tokens, self.ends = 0, []

    def tick(self, tokens):
        self.tokens += tokens

    def finished(self, prompt, completion, ids, ended):
        self.ends.append((prompt, completion, ids, ended))


@pytest.mark.parametrize("room", [None, 14])
def test_the_group_engine_tells_of_each_completion_as_it_ends(room):
    notes = Notes()
    generator = make_generator("group", helpers.tiny_llama, max_cache_tokens=room)
    drawn = generator.generate(PROMPTS, [2, 3, 1], sampling(eos_token_ids=tuple(range(60))), seed=3, observer=notes)
    places = [(p, c) for p, n in enumerate([2, 3, 1]) for c in range(n)]
    told = {(p, c): (ids, ended) for p, c, ids, ended in notes.ends}
    assert len(notes.ends) == len(told) == 6
    assert [told[place] for place in places] == list(zip(drawn.ids, drawn.finished, strict=True))
    assert notes.tokens == sum(map(len, drawn.ids))
    if room is None:  # all in flight together: the shorter, the sooner
        assert [len(ids) for _, _, ids, _ in notes.ends] == sorted(map(len, drawn.ids))
