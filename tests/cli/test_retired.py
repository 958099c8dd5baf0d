from __future__ import annotations

import dataclasses
import re

import pytest

from grpo_trainer import GRPOConfig
from grpo_trainer.cli.arguments import DatasetEntry, RecipeArguments
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import load_recipe
from grpo_trainer.cli.retired import RETIRED, translate

KNOWN = {f.name for kind in (GRPOConfig, RecipeArguments) for f in dataclasses.fields(kind)}

# The keys of GRPO recipes that open-r1 published, and of the configuration that its script reads besides TRL's.
OPEN_R1 = re.findall(
    r"\w+",
    """
attn_implementation bf16 beta chat_template dataset_config dataset_configs dataset_name dataset_prompt_column
dataset_train_split ddp_find_unused_parameters do_eval eval_steps eval_strategy generation_batch_size
gradient_accumulation_steps gradient_checkpointing gradient_checkpointing_kwargs hub_model_id hub_strategy learning_rate
log_completions log_level logging_first_step logging_steps logging_strategy loss_type lr_scheduler_kwargs
lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm max_prompt_length max_steps
model_name_or_path model_revision num_completions_to_print num_generations num_iterations num_processes num_train_epochs
output_dir per_device_eval_batch_size per_device_train_batch_size push_to_hub report_to reward_funcs reward_weights
save_steps save_strategy save_total_limit scale_rewards seed steps_per_generation system_prompt temperature
use_liger_kernel use_vllm vllm_gpu_memory_utilization weight_decay
benchmarks callbacks code_eval_scoring_mode code_eval_test_batch_size code_language code_provider cosine_max_len
cosine_max_value_correct cosine_max_value_wrong cosine_min_value_correct cosine_min_value_wrong dataset_mixture
e2b_router_url hub_model_revision ioi_provider max_completion_len morph_router_url overwrite_hub_revision
overwrite_output_dir parallel_code_exec_per_proc push_to_hub_revision remote_gen_model_url repetition_max_penalty
repetition_n_grams soft_punish_cache torch_dtype vllm_device wandb_entity wandb_log_unique_prompts wandb_project
wandb_run_group warmup_ratio
""",
)


@pytest.mark.parametrize("key", OPEN_R1)
def test_every_key_of_an_open_r1_recipe_is_known_or_retired(key):
    assert (key in KNOWN) != (key in RETIRED), key


def test_what_a_setting_became_is_a_setting_of_today():
    for name, entry in RETIRED.items():
        assert name not in KNOWN, name
        assert entry.variable or entry.became is None or entry.became in KNOWN, name
        assert entry.note


@pytest.mark.parametrize(
    ("key", "value", "settings"),
    [
        ("torch_dtype", "bfloat16", {"dtype": "bfloat16"}),
        ("evaluation_strategy", "steps", {"eval_strategy": "steps"}),
        ("per_gpu_train_batch_size", 4, {"per_device_train_batch_size": 4}),
        ("no_cuda", True, {"use_cpu": True}),
        ("warmup_ratio", 0.1, {"warmup_steps": 0.1}),
        ("warmup_ratio", 0, {"warmup_steps": 0.0}),
        ("dataset_configs", ["all"], {"dataset_config": "all"}),
        ("dataset_configs", "all", {"dataset_config": "all"}),
        ("hub_model_revision", "v1", {"hub_revision": "v1"}),
        ("gradient_checkpointing_use_reentrant", False, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}),
        ("overwrite_output_dir", True, {}),
        ("save_safetensors", True, {}),
        ("push_to_hub_revision", False, {}),
        ("callbacks", ["push_to_hub_revision"], {}),
        ("callbacks", [], {}),
        ("benchmarks", ["aime24"], {}),
        (
            "dataset_mixture",
            {
                "datasets": [{"id": "a", "config": "b", "columns": ["x"], "weight": 0.5}],
                "seed": 3,
                "test_split_size": 9,
            },
            {
                "datasets": [{"path": "a", "name": "b", "columns": ["x"], "weight": 0.5}],
                "data_seed": 3,
                "test_split_size": 9,
            },
        ),
    ],
)
def test_a_retired_setting_is_carried_over_with_a_note(key, value, settings):
    now = translate(key, value, "r.yaml")
    assert now.settings == settings and now.environment == {}
    assert now.note.startswith(f"r.yaml: {key} is ")


def test_open_r1s_mixture_is_a_mixture_of_today():
    (entry,) = translate("dataset_mixture", {"datasets": [{"id": "a", "split": "train"}]}, "r").settings["datasets"]
    assert DatasetEntry(**entry) == DatasetEntry(path="a")


def test_a_setting_that_is_an_environment_variable_now_is_one():
    now = translate("wandb_project", "sums", "r.yaml")
    assert now.settings == {} and now.environment == {"WANDB_PROJECT": "sums"}
    assert now.note == "r.yaml: wandb_project is now the environment variable WANDB_PROJECT, which is set to it"
    assert translate("wandb_entity", None, "r").environment == {}


@pytest.mark.parametrize(
    ("key", "value", "remedy"),
    [
        ("ref_model_init_kwargs", {"dtype": "auto"}, "the reference is the policy as it was handed in"),
        ("cosine_max_len", 1000, "reward_funcs: [{name: <reward>, kwargs: {<argument>: <value>}}]"),
        ("accelerate_config", "zero2", "accelerate launch --config_file FILE"),
        ("mixed_precision", "bf16", "set bf16: true"),
        ("save_safetensors", False, "weights are saved as safetensors"),
        ("push_to_hub_revision", True, "set push_to_hub: true and hub_revision"),
        ("callbacks", ["my_callback"], "give callbacks to GRPOTrainer in Python"),
        ("dataset_configs", ["a", "b"], "list them under datasets"),
        ("warmup_ratio", 1.5, "for a number of steps set warmup_steps"),
        ("warmup_ratio", "much", "must be a share in [0, 1)"),
        ("dataset_mixture", {"id": "a"}, "write datasets and test_split_size instead"),
        ("dataset_mixture", {"datasets": [], "shuffle": True}, "has shuffle"),
        ("remote_gen_model_url", "x", "vllm_server_base_url"),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_the_remedy(key, value, remedy):
    with pytest.raises(RecipeError, match=rf"^r\.yaml: {key}: ") as caught:
        translate(key, value, "r.yaml")
    assert remedy in str(caught.value)


def test_a_recipe_of_open_r1_is_read(recipe_file):
    text = """
model_name_or_path: Qwen/Qwen2.5-1.5B-Instruct
model_revision: main
torch_dtype: bfloat16
attn_implementation: flash_attention_2
dataset_name: AI-MO/NuminaMath-TIR
dataset_configs:
- all
bf16: true
use_vllm: true
vllm_device: auto
do_eval: true
eval_strategy: steps
eval_steps: 100
gradient_checkpointing_kwargs:
  use_reentrant: false
hub_strategy: every_save
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs:
  min_lr_rate: 0.1
max_prompt_length: 512
overwrite_output_dir: true
push_to_hub: true
report_to:
- wandb
reward_funcs:
- accuracy
- format
reward_weights:
- 1.0
- 0.1
save_strategy: "epoch"
scale_rewards: false
wandb_project: open-r1
warmup_ratio: 0.1
"""
    recipe = load_recipe(recipe_file(text))
    assert recipe.arguments.dtype == "bfloat16" and recipe.arguments.dataset_config == "all"
    assert recipe.settings["warmup_steps"] == 0.1 and recipe.settings["scale_rewards"] is False
    assert recipe.environment == {"WANDB_PROJECT": "open-r1"}
    noted = [note.split(": ", 1)[1].split()[0] for note in recipe.notes]
    assert noted == [
        *("torch_dtype", "dataset_configs", "vllm_device", "overwrite_output_dir", "wandb_project", "warmup_ratio"),
    ]
