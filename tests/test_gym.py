"""Tasks of reasoning-gym by name: the same problems again from the same name and seed, and what is wrong is said."""

from __future__ import annotations

import json

import pytest

from grpo_trainer.gym import load_gym_task, make, parse

reasoning_gym = pytest.importorskip("reasoning_gym", reason="the extra `rewards` is not installed")


def test_a_name_has_parameters_as_an_address_has():
    assert parse("reasoning_gym:gcd") == ("gcd", {})
    name = "reasoning_gym:basic_arithmetic?allow_negation=true&operators=[%22%2B%22]&style=plain"
    assert parse(name)[1] == {"allow_negation": True, "operators": ["+"], "style": "plain"}


def test_rows_are_the_librarys_problems():
    train, heldout = load_gym_task("reasoning_gym:chain_sum?min_terms=2&max_terms=2&size=7&test_size=3", seed=5)
    assert (len(train), len(heldout)) == (7, 3)
    own = reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=2, size=7, seed=5)
    for row, entry in zip(train, own, strict=True):
        assert row["prompt"] == [{"role": "user", "content": entry["question"]}]
        assert row["answer"] == entry["answer"]
        where = json.loads(row["problem"])
        index = where.pop("index")
        assert make(json.dumps(where))[index] == entry  # made again, whole
    questions = {row["prompt"][0]["content"] for row in train}
    assert not questions & {row["prompt"][0]["content"] for row in heldout}


def test_a_seed_decides():
    name = "reasoning_gym:gcd?size=5&test_size=2"
    first, again, other = (load_gym_task(name, seed)[0]["answer"] for seed in (1, 1, 2))
    assert first == again != other


def test_a_level_raises_every_attribute_of_the_curriculum():
    def terms(level):
        rows = load_gym_task(f"reasoning_gym:chain_sum?level={level}&size=30&test_size=1", seed=0)[0]
        return max(row["prompt"][0]["content"].count(" + ") + row["prompt"][0]["content"].count(" - ") for row in rows)

    assert terms(0) < terms(2) <= terms(9)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("reasoning_gym:game_of_life_halting", "not offered: its scorer gives full marks to any text"),
        ("reasoning_gym:chain_sums", "no task 'chain_sums'. Did you mean 'chain_sum'?"),
        ("reasoning_gym:chain_sum?max_term=3", "no parameter 'max_term'. Did you mean 'max_terms'?"),
        ("reasoning_gym:chain_sum?seed=3", "no parameter 'seed'"),
        ("reasoning_gym:chain_sum?size=0", "size is 0; give a whole number, 1 or more"),
        ("reasoning_gym:chain_sum?test_size=many", "test_size is 'many'"),
        ("reasoning_gym:chain_sum?level=-1", "level is -1"),
        ("reasoning_gym:gsm_symbolic?level=1", "has no curriculum"),
        ("reasoning_gym:chain_sum?min_terms=5&max_terms=2", "max_terms"),
    ],
)
def test_what_is_wrong_is_said_with_the_name(name, said):
    with pytest.raises(ValueError) as raised:
        load_gym_task(name)
    assert said in str(raised.value) and name in str(raised.value)
