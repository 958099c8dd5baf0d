from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import trl
from trl.scripts.grpo import GRPOScriptArguments
from trl.scripts.utils import DatasetConfig, DatasetMixtureConfig

from grpo_trainer.cli.arguments import DatasetEntry, RecipeArguments, RewardEntry
from grpo_trainer.cli.retired import RETIRED

ROOT = Path(__file__).parents[2]


def names(kind: type) -> set[str]:
    return {f.name for f in dataclasses.fields(kind)}


def test_every_setting_of_trls_command_line_is_there_or_retired():
    theirs = names(GRPOScriptArguments) | names(trl.ModelConfig) | names(DatasetMixtureConfig)
    assert theirs - names(RecipeArguments) <= set(RETIRED)
    assert names(DatasetConfig) <= names(DatasetEntry)


@pytest.mark.parametrize("kind", [GRPOScriptArguments, trl.ModelConfig, DatasetMixtureConfig])
def test_the_defaults_are_trls_or_mean_the_same(kind):
    alike = {"model_revision": (None, "main"), "dtype": (None, "float32")}  # what the trainer takes for None
    for field in dataclasses.fields(kind):
        if field.name in names(RecipeArguments) and field.default is not dataclasses.MISSING:
            ours = next(f.default for f in dataclasses.fields(RecipeArguments) if f.name == field.name)
            assert ours == field.default or (ours, field.default) == alike.get(field.name), field.name


def test_the_page_on_recipes_names_every_setting_that_is_not_the_trainers():
    text = (ROOT / "docs" / "recipes.md").read_text()
    for name in names(RecipeArguments) | names(DatasetEntry):
        assert f"`{name}`" in text, name


def test_rewards_have_a_long_form_and_weights_in_the_order_of_the_trainer():
    both = RecipeArguments(reward_model_name_or_path="m", reward_funcs=["a", RewardEntry(name="b", weight=0.5)])
    assert both.rewards() == [RewardEntry(name="a"), RewardEntry(name="b", weight=0.5)]
    assert both.weights() == [1.0, 1.0, 0.5]  # a reward model comes first
    assert RecipeArguments(reward_funcs="a").weights() == [1.0]
    assert RecipeArguments().rewards() == RecipeArguments().weights() == []


def test_the_data_have_a_name():
    entry = DatasetEntry(path="x")
    assert RecipeArguments(dataset_name="builtin:sums").data_name == "builtin:sums"
    assert RecipeArguments(dataset_name=["a.jsonl", "b.jsonl"]).data_name == "2 files"
    assert RecipeArguments(datasets=[entry, entry]).data_name == "a mixture of 2 datasets"
