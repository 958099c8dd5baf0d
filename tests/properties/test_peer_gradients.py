"""TRL's trainer and ours, given the same completions, hand the optimizer the same gradient."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.types import Completions
from tests.helpers import EOS_ID, tiny_llama, tiny_tokenizer

CASES = {
    "dapo": dict(loss_type="dapo", gradient_accumulation_steps=2),
    "grpo": dict(loss_type="grpo", gradient_accumulation_steps=2),
    "dr_grpo": dict(loss_type="dr_grpo", scale_rewards="none", gradient_accumulation_steps=2),
    # the mean of token means depends on which rows share a micro-batch, and TRL shuffles them: one micro-batch
    "bnpo": dict(loss_type="bnpo", per_device_train_batch_size=8),
    "dapo, batch scaling": dict(loss_type="dapo", scale_rewards="batch", gradient_accumulation_steps=2),
    "grpo, KL, two iterations": dict(loss_type="grpo", beta=0.2, num_iterations=2, per_device_train_batch_size=8),
    "dapo, KL without ratio": dict(
        loss_type="dapo", beta=0.2, num_iterations=2, use_bias_correction_kl=False, per_device_train_batch_size=8
    ),
    "grpo, clip-higher and two-sided": dict(
        loss_type="grpo", epsilon=0.01, epsilon_high=0.02, delta=1.05, num_iterations=3, per_device_train_batch_size=8
    ),
    "cispo": dict(loss_type="cispo", epsilon_high=5.0, gradient_accumulation_steps=2),
    "cispo, a cap that holds": dict(
        loss_type="cispo", epsilon_high=1.01, num_iterations=3, learning_rate=0.1, per_device_train_batch_size=8
    ),
    "sapo": dict(loss_type="sapo", num_iterations=3, per_device_train_batch_size=8),
    "sapo, temperatures": dict(
        loss_type="sapo",
        sapo_temperature_neg=2.0,
        sapo_temperature_pos=0.5,
        num_iterations=3,
        per_device_train_batch_size=8,
    ),
    "luspo": dict(
        loss_type="luspo",
        importance_sampling_level="sequence",
        epsilon=0.002,
        epsilon_high=0.0025,
        num_iterations=3,
        learning_rate=2e-4,
        per_device_train_batch_size=8,
    ),
    "luspo, token by token": dict(loss_type="luspo", num_iterations=2, per_device_train_batch_size=8),
    "vespo": dict(loss_type="vespo", num_iterations=3, per_device_train_batch_size=8, learning_rate=0.1),
    "vespo, another kernel": dict(
        loss_type="vespo",
        vespo_k_pos=1.0,
        vespo_lambda_pos=2.0,
        vespo_k_neg=2.0,
        vespo_lambda_neg=4.0,
        num_iterations=3,
        learning_rate=0.1,
        gradient_accumulation_steps=2,
    ),
    "GSPO": dict(
        loss_type="grpo",
        importance_sampling_level="sequence",
        epsilon=3e-4,
        epsilon_high=4e-4,
        num_iterations=3,
        learning_rate=2e-4,
        per_device_train_batch_size=8,
    ),
    "GSPO, KL": dict(
        loss_type="grpo",
        importance_sampling_level="sequence",
        beta=0.2,
        num_iterations=2,
        per_device_train_batch_size=8,
    ),
    "sequence ratios in dapo, two-sided": dict(
        loss_type="dapo",
        importance_sampling_level="sequence",
        epsilon=0.01,
        epsilon_high=0.02,
        delta=1.05,
        num_iterations=3,
        learning_rate=2e-3,
        per_device_train_batch_size=8,
    ),
    "sequence ratios in cispo": dict(
        loss_type="cispo",
        importance_sampling_level="sequence",
        epsilon_high=1.01,
        num_iterations=3,
        learning_rate=0.1,
        per_device_train_batch_size=8,
    ),
    "sequence ratios in sapo": dict(
        loss_type="sapo", importance_sampling_level="sequence", num_iterations=3, per_device_train_batch_size=8
    ),
    "GDPO": dict(
        multi_objective_aggregation="normalize_then_sum", reward_weights=[1.0, 0.5], gradient_accumulation_steps=2
    ),
    "entropy bonus": dict(entropy_coef=0.05, per_device_train_batch_size=8),
    "adaptive entropy": dict(
        loss_type="grpo",
        use_adaptive_entropy=True,
        entropy_coef=0.02,
        entropy_coef_delta=0.03,
        entropy_target=6.0,  # a uniform distribution over 256 tokens has 5.5 nats: applied from the second step on
        per_device_train_batch_size=8,
    ),
    "high-entropy tokens": dict(loss_type="grpo", top_entropy_quantile=0.4, beta=0.2, per_device_train_batch_size=8),
    "off-policy mask": dict(off_policy_mask_threshold=0.02, num_iterations=3, per_device_train_batch_size=8),
    "grpo, temperature, truncated masked": dict(
        loss_type="grpo", temperature=0.7, mask_truncated_completions=True, gradient_accumulation_steps=2
    ),
}
SLOW = {  # what differs from a quick case in a number only
    *("sapo, temperatures", "luspo, token by token", "vespo, another kernel", "sequence ratios in cispo"),
    *("sequence ratios in sapo", "sequence ratios in dapo, two-sided", "dapo, batch scaling"),
}
STEPS = 3
COMMON = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "max_steps": STEPS,
    "learning_rate": 0.5,
    "optim": "sgd",
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "gradient_checkpointing": False,
    "disable_tqdm": True,
    "shuffle_dataset": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """TRL loads its reference by name, so the model has to be on disk."""
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(seed=3).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CASES])
def test_gradients_agree_with_trl(case, checkpoint, tmp_path):
    settings = {**COMMON, **CASES[case]}
    rewards = [reward, length] if "reward_weights" in settings else reward
    theirs = trl_gradients(checkpoint, trl.GRPOConfig(str(tmp_path / "trl"), **settings), rewards)
    ours = our_gradients(checkpoint, GRPOConfig(str(tmp_path / "ours"), **settings), rewards)
    assert len(ours) == len(theirs) == STEPS
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if step > 1 and not b.any():  # all clipped
            assert not a.any()
            continue
        assert b.norm() > 0
        error = ((a - b).norm() / b.norm()).item()
        assert error <= 1e-5, f"step {step}: relative difference {error:.1e}"


def test_the_entropy_bonus_is_a_mean_over_the_tokens_of_the_step(checkpoint, tmp_path):
    """Two micro-batches or one: the same here. TRL averages the means of the micro-batches, and departs from that."""
    bonus = {k: v for k, v in COMMON.items() if k != "per_device_train_batch_size"}
    bonus.update(max_steps=1, entropy_coef=5.0)
    (whole,), (cut,) = (
        our_gradients(checkpoint, GRPOConfig(str(tmp_path / f"ours{rows}"), **bonus, **size), reward)
        for rows, size in {8: HALVES[0], 4: HALVES[1]}.items()
    )
    (theirs,) = trl_gradients(checkpoint, trl.GRPOConfig(str(tmp_path / "trl"), **bonus, **HALVES[1]), reward)
    assert (whole - cut).norm() <= 1e-5 * whole.norm()
    assert (theirs - whole).norm() > 1e-3 * whole.norm()


HALVES = [{"per_device_train_batch_size": 8}, {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}]


def rows():
    return Dataset.from_list([{"prompt": "abcdefghijkl"[: 3 + i]} for i in range(6)])


def completion(prompt_ids, place):
    """Fixed by prompt and place: 1 to 7 tokens, the odd ones ended by the end-of-sequence id, the others cut."""
    draw = torch.Generator().manual_seed(sum(prompt_ids) * 31 + place)
    length = int(torch.randint(1, 8, (1,), generator=draw))
    ids = torch.randint(4, 200, (length,), generator=draw).tolist()
    return [*ids[:-1], EOS_ID] if place % 2 else ids


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 17) / 8 for ids in completion_ids]


def length(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


class Recorder(TrainerCallback):
    def __init__(self):
        self.gradients = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients.append(torch.cat([p.grad.flatten().clone() for p in model.parameters()]))


def trl_gradients(checkpoint, config, rewards):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    recorder = Recorder()
    trainer = trl.GRPOTrainer(model, rewards, config, rows(), processing_class=tiny_tokenizer(), callbacks=[recorder])

    def generate(prompt_ids, *args, **kwargs):
        return [completion(p, i % config.num_generations) for i, p in enumerate(prompt_ids)], None

    trainer._generate_single_turn = generate
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return recorder.gradients


class Fixed:
    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        ids = [tuple(completion(p, place)) for p, n in zip(prompts, num_samples, strict=True) for place in range(n)]
        return Completions(ids=tuple(ids), finished=tuple(row[-1] == EOS_ID for row in ids))


def our_gradients(checkpoint, config, rewards):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    recorder = Recorder()
    trainer = GRPOTrainer(model, rewards, config, rows(), processing_class=tiny_tokenizer(), callbacks=[recorder])
    trainer.collector.generator = Fixed()
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return recorder.gradients
