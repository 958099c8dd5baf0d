from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing

import pytest
import yaml
from pydantic import TypeAdapter

from grpo_trainer import GRPOConfig
from grpo_trainer.cli.arguments import RecipeArguments, RewardEntry
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import load_recipe, split_words


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
    assert load_recipe(recipe_file("seed: 1"), ["--no_streaming"]).arguments.dataset_streaming is False


def test_a_name_of_before_is_a_setting_of_today_in_the_file_and_on_the_command_line(recipe_file):
    path = recipe_file("torch_dtype: bfloat16\nwarmup_ratio: 0.1")
    recipe = load_recipe(path, ["--torch_dtype", "float32", "--no_cuda", "--run_name", "7"])
    assert recipe.arguments.dtype == "float32"
    assert recipe.settings == {"warmup_steps": 0.1, "use_cpu": True, "run_name": "7"}
    assert recipe.notes == (
        f"{path}: torch_dtype is now called dtype",
        f"{path}: warmup_ratio is now warmup_steps, which below 1 is a share",
        "command line: torch_dtype is now called dtype",
        "command line: no_cuda is now called use_cpu",
    )
    with pytest.raises(RecipeError, match=r"recipe\.yaml: dtype is set twice, once under a name that it had before"):
        load_recipe(recipe_file("torch_dtype: bfloat16\ndtype: float32"))
    with pytest.raises(RecipeError, match=r"recipe\.yaml: use_cpu: 'maybe' is not bool"):
        load_recipe(recipe_file("no_cuda: maybe"))


def test_a_misspelt_name_of_before_is_suggested_too(recipe_file):
    with pytest.raises(
        RecipeError, match=r"unknown setting 'evaluation_stratgy'\. Did you mean 'evaluation_strategy'\?"
    ):
        load_recipe(recipe_file("evaluation_stratgy: steps"))


def test_the_environment_wins_over_the_file_and_the_command_line_over_both(recipe_file):
    path = recipe_file("env: {FROM_FILE: 1, SET_ALREADY: file, FLAG: true, AGREED: x}\nwandb_project: sums")
    environ = {"SET_ALREADY": "shell", "AGREED": "x", "WANDB_PROJECT": "shell"}
    recipe = load_recipe(path, ["--wandb_project", "line"], environ)
    expected = {"FROM_FILE": "1", "SET_ALREADY": "shell", "FLAG": "true", "AGREED": "x", "WANDB_PROJECT": "line"}
    assert environ == recipe.environment == expected
    assert [n for n in recipe.notes if "SET_ALREADY" in n] == [
        f"{path}: SET_ALREADY is 'file' there but 'shell' in the environment of this command, which wins"
    ]
    assert not any(name in note for note in recipe.notes for name in ("AGREED", "FLAG"))
    assert recipe.arguments.env is None and "env" not in recipe.settings


def test_a_variable_that_is_given_two_values_is_refused(recipe_file):
    with pytest.raises(RecipeError, match=r"WANDB_PROJECT is set twice, to 'a' and to 'b'"):
        load_recipe(recipe_file("env: {WANDB_PROJECT: a}\nwandb_project: b"))
    with pytest.raises(RecipeError, match=r"env: \{'A': \[1\]\} is not a mapping or null \(at A"):
        load_recipe(recipe_file("env: {A: [1]}"))


def test_variables_are_set_before_a_library_can_read_them(recipe_file):
    code = (
        "import sys\nfrom grpo_trainer.cli.recipe import load_recipe\n"
        "class Environ(dict):\n"
        "    def setdefault(self, name, value):\n"
        "        sys.exit(len({'torch', 'transformers', 'huggingface_hub', 'datasets'} & set(sys.modules)))\n"
        f"load_recipe({recipe_file('env: {HF_HUB_OFFLINE: 1}')!r}, (), Environ())\nsys.exit(99)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_changes_go_over_the_recipe(recipe_file):
    assert load_recipe(recipe_file("output_dir: a\nseed: 3")).config(output_dir="b").output_dir == "b"


OTHER_THAN_THE_DEFAULTS = """
learning_rate: 2.0e-6
logging_steps: 3
gradient_checkpointing: false
bf16: false
use_cpu: true
disable_dropout: true
cast_lm_head_to_fp32: true
num_generations: 4
num_generations_eval: 2
max_completion_length: 33
shuffle_dataset: false
steps_per_generation: 2
gradient_accumulation_steps: 4
chat_template_kwargs: {enable_thinking: false}
temperature: 0.9
top_p: 0.8
top_k: 5
min_p: 0.1
repetition_penalty: 1.1
cache_implementation: dynamic
generation_kwargs: {typical_p: 0.5}
beta: 0.04
num_iterations: 2
epsilon: 0.1
epsilon_high: 0.3
delta: 1.5
loss_type: grpo
scale_rewards: batch
reward_weights: [0.5, 2.0]
mask_truncated_completions: true
use_bias_correction_kl: false
sync_ref_model: true
ref_model_mixup_alpha: 0.5
ref_model_sync_steps: 64
log_completions: true
num_completions_to_print: 2
advantage_ddof: 0
cpu_threads: 1
"""


def test_every_key_of_a_recipe_reaches_the_configuration_field_by_field(recipe_file):
    given = yaml.safe_load(OTHER_THAN_THE_DEFAULTS)
    defaults = {f.name: f.default for f in dataclasses.fields(GRPOConfig)}
    assert [name for name, value in given.items() if defaults[name] == value] == []
    config = load_recipe(recipe_file(OTHER_THAN_THE_DEFAULTS)).config()
    assert {name: getattr(config, name) for name in given} == given
