from __future__ import annotations

import types

import pytest
import torch
from datasets import Dataset
from transformers.trainer_callback import TrainerCallback

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.cli.plan import count, memory_of, optimizer_bytes, plan_of
from tests.helpers import tiny_llama, tiny_tokenizer

ROWS = [{"prompt": f"question {i}"} for i in range(10)]


def reward(completions, **kwargs):
    return [float(len(text) % 3) for text in completions]


def trainer(tmp_path, data=None, model=None, peft_config=None, **settings):
    given = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
        "steps_per_generation": 6,
        "num_generations": 4,
        "max_completion_length": 3,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "shuffle_dataset": False,
        "disable_tqdm": True,
        "save_strategy": "no",
        **settings,
    }
    rows = Dataset.from_list(ROWS) if data is None else data
    return GRPOTrainer(
        model or tiny_llama(),
        reward,
        GRPOConfig(str(tmp_path), **given),
        rows,
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )


def test_the_figures_of_a_run(tmp_path):
    plan = plan_of(trainer(tmp_path, num_train_epochs=2.5, num_iterations=2))
    assert (plan.processes, plan.num_generations, plan.passes) == (1, 4, 2)
    assert plan.prompts_per_rollout == 3  # 2 completions x 6 micro-batches, in groups of 4
    assert (plan.micro_batch, plan.micro_batches_per_rollout, plan.micro_batches_per_step) == (2, 6, 4)
    assert plan.completions_per_step == 8
    # 10 rows are 3 rollouts of 3 prompts; each has 6 x 2 micro-steps, so 36 in an epoch, 4 to a step
    assert (plan.rows, plan.steps_per_epoch, plan.steps) == (10, 9, 23)  # 2.5 x 9, rounded up
    assert "question 0" in plan.first_prompt
    lines = "\n".join(plan.lines())
    assert "3 prompts x 4 completions = 12, on each process 6 micro-batches of 2, 2 passes" in lines
    assert "8 completions of 2 prompts, on each process 4 micro-batches of 2" in lines
    assert "23 in all, 9 per epoch" in lines
    assert "(left out: activations, logits" in lines


def test_the_steps_are_those_that_are_run(tmp_path):
    run = trainer(tmp_path, num_train_epochs=1.5, gradient_accumulation_steps=5)
    plan = plan_of(run)
    run.train()
    assert run.state.global_step == run.state.max_steps == plan.steps


def test_the_first_prompt_is_that_of_the_shuffled_run(tmp_path):
    shown: list[str] = []

    run = trainer(tmp_path, max_steps=1, shuffle_dataset=True, seed=3)
    plan = plan_of(run)
    listener = TrainerCallback()
    listener.on_rollout = lambda *args, table, **kwargs: shown.extend(table["prompt"])
    run.add_callback(listener)
    run.train()
    assert shown[0] == plan.first_prompt
    assert plan.first_prompt != plan_of(trainer(tmp_path)).first_prompt


def test_a_stream_has_no_epoch(tmp_path):
    plan = plan_of(trainer(tmp_path, Dataset.from_list(ROWS).to_iterable_dataset(), max_steps=7))
    assert (plan.rows, plan.steps_per_epoch, plan.steps) == (None, None, 7)
    assert "question 0" in plan.first_prompt
    assert any("7 in all, an epoch has no known length (a stream)" in line for line in plan.lines())


def test_memory_of_a_whole_model_and_its_reference(tmp_path):
    model = tiny_llama()
    size = sum(p.numel() for p in model.parameters())
    run = trainer(tmp_path, model=model, beta=0.1)
    assert memory_of(run) == {
        "weights": 4 * size,
        "gradients": 4 * size,
        "optimizer": 8 * size,
        "reference": 4 * size,
    }
    plan = plan_of(run)
    assert plan.trainable == plan.parameters == size
    assert memory_of(trainer(tmp_path, optim="sgd"))["optimizer"] == 0
    assert memory_of(trainer(tmp_path))["reference"] == 0


def test_memory_of_an_adapter_is_that_of_its_own_weights(tmp_path):
    from peft import LoraConfig

    adapter = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    run = trainer(tmp_path, peft_config=adapter, beta=0.1)
    trained = sum(p.numel() for p in run.model.parameters() if p.requires_grad)
    assert 0 < trained < plan_of(run).parameters
    assert plan_of(run).trainable == trained
    memory = memory_of(run)
    assert (memory["gradients"], memory["optimizer"], memory["reference"]) == (4 * trained, 8 * trained, 0)


def test_several_processes_hold_the_buckets_of_ddp(tmp_path):
    run = trainer(tmp_path)
    run.plan = types.SimpleNamespace(world_size=2)
    memory = memory_of(run)
    assert memory["buckets of DDP"] == memory["gradients"]


@pytest.mark.parametrize(
    ("name", "bytes_"),
    [
        ("adamw_torch", 8 * 10_000 + 8 * 10),
        ("adamw_torch_fused", 8 * 10_000 + 8 * 10),
        ("adamw_bnb_8bit", 2 * 10_000 + 8 * 10),  # small tensors stay in float32
        ("paged_lion_8bit", 10_000 + 4 * 10),
        ("adamw_torch_4bit", 10_000 + 8 * 10),
        ("rmsprop", 4 * 10_010),
        ("adafactor", None),
    ],
)
def test_what_an_optimizer_keeps(name, bytes_):
    assert optimizer_bytes(name, [torch.zeros(100, 100), torch.zeros(10)]) == bytes_


def test_a_weight_of_four_bits_is_half_a_byte():
    packed = type("Params4bit", (torch.nn.Parameter,), {})(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    assert count(packed) == 16
    assert count(torch.nn.Parameter(torch.zeros(8))) == 8
