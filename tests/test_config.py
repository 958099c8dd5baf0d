"""The configuration: TRL's fields and defaults, and a clear word where values contradict each other."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import trl
from packaging.version import Version
from transformers import TrainingArguments

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.not_yet import NOT_YET


def config(**settings):
    return GRPOConfig("out", **{"num_generations": 4, "report_to": "none", **settings})


def test_every_field_of_trl_is_there_with_its_default():
    theirs = {f.name: f for f in dataclasses.fields(trl.GRPOConfig)}
    ours = {f.name: f for f in dataclasses.fields(GRPOConfig)}
    assert theirs.keys() - ours.keys() == set()
    older = {"pad_to_multiple_of"} if Version(trl.__version__) < Version("1.16") else set()  # another default then
    for name in theirs.keys() - older:
        assert ours[name].default == theirs[name].default or ours[name].default is theirs[name].default, name


def test_every_constructor_argument_of_trl_is_there_in_its_order_with_its_default():
    theirs = inspect.signature(trl.GRPOTrainer.__init__).parameters
    ours = inspect.signature(GRPOTrainer.__init__).parameters
    assert list(ours) == list(theirs)
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


def test_every_field_that_is_not_honoured_is_refused():
    defaults = {f.name: f for f in dataclasses.fields(GRPOConfig) if f.name in NOT_YET}
    assert len(defaults) >= 15
    for name, f in defaults.items():
        other = {bool: not f.default, int: 7, float: 0.37, str: "other"}.get(type(f.default), "other")
        with pytest.raises(ValueError, match=f"{name}=.*not supported yet"):
            config(per_device_train_batch_size=4, **{name: other})


def test_works_without_arguments_on_a_machine_without_an_accelerator():
    made = GRPOConfig("out", report_to="none")
    assert made.bf16 in (True, False)
    assert made.use_cpu == (not torch.accelerator.is_available())
    assert made.generation_batch_size == 8
    assert made.steps_per_generation == made.gradient_accumulation_steps == 1


def test_fp16_leaves_bf16_off():
    assert config(per_device_train_batch_size=4, bf16=None, fp16=True).bf16 is False


def test_gradient_checkpointing_is_on_by_default_and_can_be_switched_off():
    assert config(per_device_train_batch_size=4).gradient_checkpointing is True
    assert config(per_device_train_batch_size=4, gradient_checkpointing=False).gradient_checkpointing is False


@pytest.mark.parametrize(("value", "meaning"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_takes_booleans(value, meaning):
    assert config(per_device_train_batch_size=4, scale_rewards=value).scale_rewards == meaning


@pytest.mark.parametrize("policy", ["filter", "truncate_left", "error"])
def test_a_prompt_limit_is_off_unless_asked_for_and_has_a_policy_by_name(policy):
    made = config(per_device_train_batch_size=4)
    assert (made.max_prompt_length, made.overlong_prompts) == (None, "truncate_left")
    made = config(per_device_train_batch_size=4, max_prompt_length=8, overlong_prompts=policy)
    assert (made.max_prompt_length, made.overlong_prompts) == (8, policy)


def test_one_of_slices_and_generation_batch_size_gives_the_other():
    assert config(per_device_train_batch_size=2, steps_per_generation=3, num_generations=2).generation_batch_size == 6
    assert config(per_device_train_batch_size=2, steps_per_generation=6).generation_batch_size == 12
    assert config(per_device_train_batch_size=2, generation_batch_size=12).steps_per_generation == 6


def test_a_settled_configuration_can_be_copied():
    settled = config(per_device_train_batch_size=2, steps_per_generation=6)
    assert dataclasses.replace(settled, seed=7).generation_batch_size == 12


def test_json_text_becomes_a_mapping():
    assert config(per_device_train_batch_size=4, generation_kwargs='{"typical_p": 0.9}').generation_kwargs == {
        "typical_p": 0.9
    }


REFUSED = {
    "a rollout that is not whole groups": (
        dict(per_device_train_batch_size=2, steps_per_generation=3),
        # 2 x 1 x 3 = 6 completions; 4 does not divide 6, and 2 x 4 = 8 is the next that it divides
        r"6 completions .*per_device_train_batch_size=2 x 1 processes x steps_per_generation=3.*num_generations=4.*"
        r"steps_per_generation=4.*\[2, 3, 6\]",
    ),
    "a group of one": (dict(num_generations=1, per_device_train_batch_size=4), "num_generations=1 must be at least 2"),
    "both ways of saying how large a rollout is": (
        dict(per_device_train_batch_size=2, generation_batch_size=12, steps_per_generation=4),
        r"generation_batch_size=12 and steps_per_generation=4 \(x 2 a step\)",
    ),
    "a generation batch that micro-batches do not divide": (
        dict(per_device_train_batch_size=3, generation_batch_size=8, num_generations=2),
        "generation_batch_size=8 is not a multiple of 3 .*Set generation_batch_size=9",
    ),
    "the batch-size finder": (dict(per_device_train_batch_size=4, auto_find_batch_size=True), "auto_find_batch_size"),
    "temperature 0": (dict(per_device_train_batch_size=4, temperature=0.0), "temperature=0.0 must be above 0"),
    "top_p 0": (dict(per_device_train_batch_size=4, top_p=0.0), "top_p=0.0 must be in"),
    "negative beta": (dict(per_device_train_batch_size=4, beta=-0.1), "beta=-0.1 must be 0 or above"),
    "beta that is no number": (dict(per_device_train_batch_size=4, beta=float("nan")), "beta=nan"),
    "delta below the clip": (
        dict(per_device_train_batch_size=4, delta=1.1, epsilon_high=0.28),
        r"delta=1.1 must be above 1 \+ epsilon_high = 1.28",
    ),
    "an unknown policy for long prompts": (
        dict(per_device_train_batch_size=4, max_prompt_length=8, overlong_prompts="filer"),
        "overlong_prompts='filer' is unknown. Did you mean 'filter'.*Legal: filter, truncate_left, error",
    ),
    "a list where one policy belongs": (
        dict(per_device_train_batch_size=4, max_prompt_length=8, overlong_prompts=["filter"]),
        r"overlong_prompts=\['filter'\] is unknown",
    ),
    "a policy without a limit": (
        dict(per_device_train_batch_size=4, overlong_prompts="filter"),
        "overlong_prompts='filter' has nothing to act on without a limit: set max_prompt_length",
    ),
    "no room for a prompt": (
        dict(per_device_train_batch_size=4, max_prompt_length=0),
        "max_prompt_length=0 must be at least 1, or None",
    ),
    "half a token": (
        dict(per_device_train_batch_size=4, max_prompt_length=8.5),
        "max_prompt_length=8.5 must be a whole",
    ),
    "no end of tokens": (
        dict(per_device_train_batch_size=4, max_prompt_length=float("inf")),
        "max_prompt_length=inf must be a whole",
    ),
    "an unknown scale": (dict(per_device_train_batch_size=4, scale_rewards="std"), "scale_rewards='std' is unknown"),
    "no room for a completion": (
        dict(per_device_train_batch_size=4, max_completion_length=0),
        "max_completion_length=0 must be at least 1",
    ),
    "columns taken from the rewards": (
        dict(per_device_train_batch_size=4, remove_unused_columns=True),
        "remove_unused_columns=True",
    ),
    "text that is not JSON": (dict(per_device_train_batch_size=4, model_init_kwargs="{dtype"), "model_init_kwargs"),
    "no iteration": (dict(per_device_train_batch_size=4, num_iterations=0), "num_iterations=0 must be at least 1"),
    "a reference that moves and is not there": (
        dict(per_device_train_batch_size=4, sync_ref_model=True),
        r"sync_ref_model=True moves the reference, but beta=0.0 needs none: set beta above 0",
    ),
    "a reference that takes nothing": (
        dict(per_device_train_batch_size=4, beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=0.0),
        r"ref_model_mixup_alpha=0.0 must be in \(0, 1\]",
    ),
    "a reference that takes too much": (
        dict(per_device_train_batch_size=4, beta=0.1, sync_ref_model=True, ref_model_mixup_alpha=1.5),
        "ref_model_mixup_alpha=1.5 must be in",
    ),
    "a reference that moves every no step": (
        dict(per_device_train_batch_size=4, beta=0.1, sync_ref_model=True, ref_model_sync_steps=0),
        "ref_model_sync_steps=0 must be at least 1",
    ),
    "a reference that moves every no step at all": (
        dict(per_device_train_batch_size=4, beta=0.1, sync_ref_model=True, ref_model_sync_steps=None),
        "ref_model_sync_steps=None must be a number",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_with_field_numbers_and_remedy(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        config(**settings)


def test_parsers_of_trl_and_transformers_take_it(tmp_path):
    parser = trl.TrlParser((GRPOConfig, trl.ModelConfig))
    words = ["--output_dir", str(tmp_path), "--scale_rewards", "none", "--num_generations", "4", "--report_to", "none"]
    parsed, _ = parser.parse_args_and_config([*words, "--per_device_train_batch_size", "4"])
    assert (parsed.scale_rewards, parsed.num_generations) == ("none", 4)


def test_no_step_is_not_every_step():
    with pytest.raises(ValueError, match="max_steps=0"):
        config(per_device_train_batch_size=4, max_steps=0)


@pytest.mark.parametrize("name", ["temperature", "beta", "num_generations", "epsilon"])
def test_a_text_where_a_number_belongs_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"{name}='1.0' must be a number"):
        config(per_device_train_batch_size=4, **{name: "1.0"})


def test_what_is_not_a_field_is_refused():
    with pytest.raises(TypeError, match="max_prompt_lenght"):
        config(per_device_train_batch_size=4, max_prompt_lenght=5)


def test_it_is_a_training_arguments():
    assert isinstance(config(per_device_train_batch_size=4), TrainingArguments)


@pytest.mark.parametrize("below", ["", "/deeper/out"])
def test_an_output_folder_that_cannot_be_one_is_refused_at_once(tmp_path, below):
    file = tmp_path / "results.txt"
    file.write_text("")
    with pytest.raises(ValueError, match=rf"output_dir=.*{below}' cannot be a folder, since '.*results.txt' is a file"):
        GRPOConfig(f"{file}{below}")
