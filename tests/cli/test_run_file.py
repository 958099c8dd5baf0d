from __future__ import annotations

import dataclasses
import subprocess
import sys
from importlib import metadata

import pytest
import yaml

from grpo_trainer import GRPOConfig, __version__
from grpo_trainer.cli.recipe import load_recipe
from grpo_trainer.cli.run_file import git_state, masked, run_file, save_run_file, versions, without_secrets
from grpo_trainer.cli.shipped import recipe_names

EVERYTHING = """
model_name_or_path: some/model
dtype: bfloat16
chat_template: "{% for m in messages %}\\n{{ m.content }}{% endfor %}"
use_peft: true
lora_target_modules: [q_proj, v_proj]
datasets:
- {path: a.jsonl, split: "train[:10]", columns: [prompt], fraction: 0.5}
- {path: [b.jsonl, c.jsonl], fraction: 0.5, column_mapping: {question: prompt}}
test_split_size: 64
system_prompt: "no"
reward_funcs:
- last_integer
- {name: "my.mod:fn", weight: 0.5, kwargs: {limit: 40, words: ["no", "1e-6", "12:30"]}}
env: {WANDB_PROJECT: sums, HF_HUB_OFFLINE: 1}
learning_rate: 1e-7
num_generations: 4
per_device_train_batch_size: 4
scale_rewards: false
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.1
report_to: [tensorboard]
model_init_kwargs: {use_cache: false}
run_name: "1e-6"
output_dir: "2025-01-31"
save_strategy: no
resume_from_checkpoint: true
"""


def saved(recipe_file, tmp_path, text: str, words=()):
    recipe = load_recipe(recipe_file(text), words)
    return recipe, load_recipe(str(save_run_file(tmp_path / "out", recipe, ["grpo-trainer", "train"], processes=1)))


@pytest.mark.parametrize("text", ["output_dir: out\nnum_generations: 2\nper_device_train_batch_size: 2", EVERYTHING])
def test_the_file_of_a_run_gives_its_configuration_again_field_by_field(recipe_file, tmp_path, text):
    recipe, again = saved(recipe_file, tmp_path, text, ["--seed", "7"])
    then, now = recipe.config(), again.config()
    for field in dataclasses.fields(GRPOConfig):
        if field.name != "resume_from_checkpoint":
            assert getattr(then, field.name) == getattr(now, field.name), field.name
    assert now.seed == 7 and now.resume_from_checkpoint is None
    assert now.world_size == then.world_size


@pytest.mark.parametrize("text", ["model_name_or_path: m", EVERYTHING])
def test_and_its_model_data_and_rewards(recipe_file, tmp_path, text):
    recipe, again = saved(recipe_file, tmp_path, text)
    told = dataclasses.replace(again.arguments, provenance=None, num_processes=None)
    assert told == dataclasses.replace(recipe.arguments, env=None)
    assert again.environment == recipe.environment
    assert again.arguments.num_processes == 1
    assert again.notes == ()  # nothing in it goes by a name of before


@pytest.mark.parametrize("name", recipe_names())
def test_the_file_of_the_file_says_the_same(recipe_file, name):
    first = run_file(load_recipe(name), [], processes=1)
    second = run_file(load_recipe(recipe_file(first)), [], processes=1)
    assert yaml.safe_load(first) == yaml.safe_load(second)


def test_every_field_stands_in_it_also_at_its_default(recipe_file):
    content = yaml.safe_load(run_file(load_recipe(recipe_file("seed: 1")), [], processes=1))
    assert {f.name for f in dataclasses.fields(GRPOConfig) if f.init} <= set(content)
    assert (content["loss_type"], content["seed"]) == ("dapo", 1)
    assert content["bf16"] is None  # which the machine settles


def test_other_readers_of_yaml_read_the_same(recipe_file):
    recipe = load_recipe(recipe_file(EVERYTHING))
    content = yaml.safe_load(run_file(recipe, [], processes=1))  # YAML 1.1, where a bare no is false
    assert (content["system_prompt"], content["save_strategy"], content["run_name"]) == ("no", "no", "1e-6")
    assert content["output_dir"] == "2025-01-31"
    assert content["reward_funcs"][1]["kwargs"]["words"] == ["no", "1e-6", "12:30"]
    assert content["learning_rate"] == 1e-7


def test_it_tells_where_it_comes_from(recipe_file, monkeypatch):
    content = yaml.safe_load(
        run_file(load_recipe(recipe_file("seed: 1")), ["grpo-trainer", "train", "a b"], processes=2)
    )
    told = content["provenance"]
    assert told["command"] == "grpo-trainer train 'a b'"
    assert content["num_processes"] == 2
    assert told["versions"] == versions()
    assert versions()["grpo_trainer"] == __version__ and versions()["torch"] == metadata.version("torch")
    assert versions()["python"] == ".".join(map(str, sys.version_info[:3]))
    assert list(versions()) == [
        "python",
        "grpo_trainer",
        "torch",
        "transformers",
        "trl",
        "peft",
        "accelerate",
        "datasets",
    ]


def test_the_state_of_the_repository_is_told_if_there_is_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state() is None
    commands = ["init -q", "-c user.name=n -c user.email=e commit -q --allow-empty -m x"]
    for command in commands:
        subprocess.run(["git", *command.split()], check=True)
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    (tmp_path / "new").write_text("untracked files change nothing that is run")
    assert git_state() == {"commit": head, "changed": False}
    subprocess.run(["git", "add", "new"], check=True)
    assert git_state() == {"commit": head, "changed": True}
    monkeypatch.setenv("PATH", "")
    assert git_state() is None  # no git either


SECRET = "hf_abcdefgh"


def test_no_secret_is_written(recipe_file):
    text = (
        f"hub_token: {SECRET}\nmodel_init_kwargs: {{token: {SECRET}, use_cache: true}}\n"
        f"env: {{WANDB_API_KEY: {SECRET}, HF_TOKEN: {SECRET}, TOKENIZERS_PARALLELISM: false}}"
    )
    words = ["--push_to_hub_token", SECRET, f"--hub-token={SECRET}", "--env", f"{{WANDB_API_KEY: {SECRET}}}"]
    recipe = load_recipe(recipe_file(text))
    command = ["grpo-trainer", "train", "x.yaml", *words, "--generation_kwargs", "{eos_token_id: 3}", "--seed", "1"]
    written = run_file(recipe, command, processes=1)
    assert SECRET not in written
    content = yaml.safe_load(written)
    assert content["hub_token"] is None
    assert content["model_init_kwargs"] == {"use_cache": True}
    assert content["env"] == {"TOKENIZERS_PARALLELISM": "false"}
    assert content["provenance"]["left_out"] == [
        *("env.WANDB_API_KEY", "env.HF_TOKEN", "hub_token", "model_init_kwargs.token"),
    ]
    assert content["provenance"]["command"].endswith("--generation_kwargs '{eos_token_id: 3}' --seed 1")


def test_what_only_sounds_like_a_secret_is_kept():
    kept = {
        "include_num_input_tokens_seen": True,
        "generation_kwargs": {"eos_token_id": 2, "pad_token": "x"},
        "seed": 1,
    }
    assert without_secrets(kept) == (kept, [])
    assert without_secrets({"hub_token": None}) == ({"hub_token": None}, [])
    assert masked(["--num_generations", "4", "--run_name", "a"]) == ["--num_generations", "4", "--run_name", "a"]


def test_it_is_complete_or_not_there(recipe_file, tmp_path):
    path = save_run_file(tmp_path / "a" / "b", load_recipe(recipe_file("seed: 1")), [], processes=1)
    assert [p.name for p in path.parent.iterdir()] == ["run.yaml"]
    assert path.read_text().startswith(f"# What this run was started with. `grpo-trainer train {path}` repeats it.\n")
