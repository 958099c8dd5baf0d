from __future__ import annotations

import dataclasses
import typing
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from grpo_trainer import GRPOConfig
from grpo_trainer.cli import recipe as module
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import (
    RecipeArguments,
    RewardEntry,
    find_recipe,
    load_recipe,
    recipe_names,
    recipes_folder,
    split_words,
)

ROOT = Path(__file__).parents[2]
SUMS = "quickstart/smollm2-135m-sums"


def test_keys_are_sorted_into_arguments_and_settings(recipe_file):
    recipe = load_recipe(recipe_file("model_name_or_path: m\nlearning_rate: 1e-6\nreward_funcs: [last_integer]\n"))
    assert recipe.arguments == RecipeArguments(model_name_or_path="m", reward_funcs=["last_integer"])
    assert recipe.settings == {"learning_rate": 1e-6}


def test_the_command_line_beats_the_file(recipe_file):
    path = recipe_file("learning_rate: 1e-6\nmax_steps: 5\n")
    recipe = load_recipe(path, ["--learning_rate", "2e-6", "--num-generations=4"])
    assert recipe.settings == {"learning_rate": 2e-6, "max_steps": 5, "num_generations": 4}


def test_eight_and_a_half_generations_are_refused_wherever_they_stand(recipe_file):
    with pytest.raises(RecipeError, match=r"recipe\.yaml: num_generations: 8\.5 is not int or null"):
        load_recipe(recipe_file("num_generations: 8.5"))
    with pytest.raises(RecipeError, match=r"command line: num_generations: 8\.5 is not int or null"):
        load_recipe(recipe_file("seed: 1"), ["--num_generations", "8.5"])


@pytest.mark.parametrize(
    ("key", "near"),
    [("learning_rat", "learning_rate"), ("lora_alfa", "lora_alpha"), ("num_generation", "num_generations")],
)
def test_an_unknown_key_is_refused_with_the_nearest(recipe_file, key, near):
    with pytest.raises(RecipeError, match=rf"recipe\.yaml: unknown setting '{key}'\. Did you mean '{near}'\?"):
        load_recipe(recipe_file(f"{key}: 1"))
    with pytest.raises(RecipeError, match=rf"command line: unknown setting '{key}'\. Did you mean '{near}'\?"):
        load_recipe(recipe_file("seed: 1"), [f"--{key}", "1"])


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "1: 2", ""])
def test_a_recipe_must_be_a_flat_mapping(recipe_file, text):
    with pytest.raises(RecipeError, match="must be a flat mapping of settings"):
        load_recipe(recipe_file(text))


def test_a_strategy_of_no_needs_no_quotes(recipe_file):
    assert load_recipe(recipe_file("save_strategy: no\n")).config().save_strategy == "no"


def test_a_choice_that_is_not_there_is_refused_with_the_nearest(recipe_file):
    with pytest.raises(RecipeError, match=r"lr_scheduler_type: 'constnt' is unknown\. Did you mean 'constant'\?"):
        load_recipe(recipe_file("lr_scheduler_type: constnt"))


def test_rewards_may_be_names_or_mappings(recipe_file):
    text = """
reward_funcs:
  - last_integer
  - {name: "my.mod:fn", weight: 0.5, kwargs: {limit: 40}}
"""
    recipe = load_recipe(recipe_file(text))
    assert recipe.arguments.rewards() == [
        RewardEntry(name="last_integer"),
        RewardEntry(name="my.mod:fn", weight=0.5, kwargs={"limit": 40}),
    ]
    assert recipe.config().reward_weights == [1.0, 0.5]
    one = load_recipe(recipe_file("reward_funcs: last_integer"))
    assert one.arguments.rewards() == [RewardEntry(name="last_integer")]
    assert one.config().reward_weights is None
    assert load_recipe(recipe_file("reward_funcs: {name: last_integer, weight: 2}")).config().reward_weights == [2.0]
    assert load_recipe(recipe_file("seed: 1")).arguments.rewards() == []


def test_an_unknown_key_of_a_reward_is_refused(recipe_file):
    with pytest.raises(RecipeError, match=r"reward_funcs: .* \(at 0\.wieght: unexpected keyword argument\)"):
        load_recipe(recipe_file("reward_funcs: [{name: last_integer, wieght: 2}]"))


def test_weights_given_in_two_places_are_refused(recipe_file):
    recipe = load_recipe(recipe_file("reward_funcs: [{name: last_integer, weight: 2}]\nreward_weights: [3]"))
    with pytest.raises(RecipeError, match=r"reward_weights=\[3\.0\] and weights \[2\.0\] in reward_funcs say the same"):
        recipe.config()


def test_model_settings_reach_the_arguments_of_the_model(recipe_file):
    text = "dtype: bfloat16\nattn_implementation: sdpa\nmodel_revision: v1\nmodel_init_kwargs: {use_cache: false}"
    assert load_recipe(recipe_file(text)).config().model_init_kwargs == {
        "dtype": "bfloat16",
        "attn_implementation": "sdpa",
        "revision": "v1",
        "use_cache": False,
    }
    assert load_recipe(recipe_file("seed: 1")).config().model_init_kwargs is None


def test_what_the_configuration_refuses_is_an_error_of_the_recipe(recipe_file):
    path = recipe_file("num_generations: 7\nper_device_train_batch_size: 8")
    with pytest.raises(RecipeError, match=r"recipe\.yaml: .*num_generations=7"):
        load_recipe(path).config()


def test_resuming_takes_a_folder_or_true(recipe_file):
    for text, value in [("true", True), ("out/checkpoint-5", "out/checkpoint-5"), ("null", None)]:
        assert load_recipe(recipe_file(f"resume_from_checkpoint: {text}")).settings["resume_from_checkpoint"] == value


def test_every_setting_has_a_type_that_its_default_fits():
    hints = typing.get_type_hints(GRPOConfig) | typing.get_type_hints(RecipeArguments)
    for kind in (GRPOConfig, RecipeArguments):
        for field in dataclasses.fields(kind):
            default = field.default_factory() if field.default is dataclasses.MISSING else field.default
            assert TypeAdapter(hints[field.name]).validate_python(default) == default, field.name


def test_no_two_settings_share_a_name():
    config, arguments = ({f.name for f in dataclasses.fields(kind)} for kind in (GRPOConfig, RecipeArguments))
    assert config.isdisjoint(arguments)


def test_words_are_split_into_settings():
    words = ["--a", "1", "--b=x=y", "--c-d", "--e", "-1", "p q", "--a", "2"]
    assert split_words(words) == {"a": ["2"], "b": ["x=y"], "c_d": [], "e": ["-1", "p q"]}


@pytest.mark.parametrize("words", [["x"], ["--a=1", "x"]])
def test_a_word_that_belongs_to_no_setting_is_refused(words):
    with pytest.raises(RecipeError, match="unexpected word 'x'"):
        split_words(words)


def test_a_bare_flag_is_true_and_no_is_false(recipe_file):
    recipe = load_recipe(recipe_file("seed: 1"), ["--use_peft", "--no_gradient_checkpointing"])
    assert recipe.arguments.use_peft is True
    assert recipe.settings["gradient_checkpointing"] is False
    with pytest.raises(RecipeError, match="unknown setting 'no_such_thing'"):
        load_recipe(recipe_file("seed: 1"), ["--no_such_thing"])
    with pytest.raises(RecipeError, match="use_cpu: None is not bool"):
        load_recipe(recipe_file("seed: 1"), ["--use_cpu", "null"])


@pytest.mark.parametrize("name", [SUMS, f"{SUMS}.yaml", "smollm2-135m-sums", f"recipes/{SUMS}.yaml"])
def test_packaged_recipes_are_found_by_name_from_anywhere(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe(name) == ROOT / "recipes" / f"{SUMS}.yaml"


def test_a_file_comes_before_a_packaged_recipe_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("smollm2-135m-sums").write_text("seed: 1")
    assert find_recipe("smollm2-135m-sums") == Path("smollm2-135m-sums")


def test_a_recipe_that_is_not_there_is_refused_with_the_nearest():
    with pytest.raises(RecipeError, match=r"no file 'smollm2-135m-sum'.*Did you mean 'smollm2-135m-sums'\?"):
        find_recipe("smollm2-135m-sum")


def test_a_name_that_stands_for_several_is_refused(tmp_path, monkeypatch):
    for folder in ("a", "b", "accelerate"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.yaml").write_text("seed: 1")
    monkeypatch.setattr(module, "recipes_folder", lambda: tmp_path)
    assert recipe_names() == ["a/x", "b/x"]  # accelerate's own files are no recipes
    assert find_recipe("a/x") == tmp_path / "a" / "x.yaml"
    with pytest.raises(RecipeError, match="'x' stands for several: a/x, b/x"):
        find_recipe("x")


@pytest.mark.parametrize("name", recipe_names())
def test_every_packaged_recipe_is_read_and_makes_a_configuration(name):
    recipe = load_recipe(name)
    recipe.config()
    assert recipe.arguments.model_name_or_path and recipe.arguments.dataset_name and recipe.arguments.rewards()
    assert f"[{name}]({name}.yaml)" in (ROOT / "recipes" / "README.md").read_text()


def test_the_readme_names_every_setting_that_is_not_the_trainers():
    text = (recipes_folder() / "README.md").read_text()
    for field in dataclasses.fields(RecipeArguments):
        assert f"`{field.name}`" in text
