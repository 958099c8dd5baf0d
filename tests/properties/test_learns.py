"""A tiny random model, trained through the public trainer, learns; with the advantage negated it does not."""

from __future__ import annotations

import pytest
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.functional.advantages import ADVANTAGES, MULTI_REWARD_ADVANTAGES
from grpo_trainer.functional.correction import CORRECTIONS
from grpo_trainer.functional.kl import KL_ESTIMATORS
from grpo_trainer.functional.ratios import RATIOS
from grpo_trainer.objective import LOSS_TYPES, SCALE_REWARDS
from tests.helpers import tiny_llama, tiny_tokenizer

STEPS = 40


def early_letters(completions, **kwargs):
    """The share of a completion's characters that stand in the first half of the vocabulary; about 0.4 at random."""
    return [sum(c < "\xa0" for c in text) / max(len(text), 1) for text in completions]


def rewards_of_a_run(tmp_path, seed, sign=1.0, **settings):
    config = GRPOConfig(
        str(tmp_path),
        **{
            "seed": seed,
            "per_device_train_batch_size": 32,
            "num_generations": 8,
            "max_completion_length": 8,
            "max_steps": STEPS,
            "learning_rate": 5e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "disable_tqdm": True,
            **settings,
        },
    )
    rows = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three", "four")])
    trainer = GRPOTrainer(tiny_llama(seed), early_letters, config, rows, processing_class=tiny_tokenizer())
    advantage, joint = trainer.collector.advantage, trainer.collector.joint_advantage
    trainer.collector.advantage = lambda rewards: sign * advantage(rewards)
    if joint is not None:
        trainer.collector.joint_advantage = lambda rewards, weights: sign * joint(rewards, weights=weights)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises(tmp_path, seed):
    rewards = rewards_of_a_run(tmp_path, seed)
    assert len(rewards) == STEPS
    assert rewards[0] < 0.6
    assert rewards[-1] > 0.9


def test_reward_falls_if_the_advantage_is_negated(tmp_path):
    rewards = rewards_of_a_run(tmp_path, seed=0, sign=-1.0)
    assert rewards[-1] < 0.15


OFF_POLICY = {"num_iterations": 2, "per_device_train_batch_size": 32}
RLOO = {"loss_type": "reinforce", "advantage_estimator": "leave_one_out"}
VARIANTS = {  # with the settings of their papers, and every rollout used twice where the variant is about that
    "dapo, clip-higher": {"loss_type": "dapo", "epsilon_high": 0.28, **OFF_POLICY},
    "two-sided clip": {"loss_type": "dapo", "delta": 4.0, **OFF_POLICY},
    "grpo": {"loss_type": "grpo", "beta": 0.04, **OFF_POLICY},
    # it divides by the largest length and not by the deviation: its gradient is smaller
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", "learning_rate": 1e-2, **OFF_POLICY},
    "bnpo": {"loss_type": "bnpo", **OFF_POLICY},
    "batch deviation": {"scale_rewards": "batch"},
    "population deviation": {"advantage_ddof": 0},
    "cispo": {"loss_type": "cispo", **OFF_POLICY},
    "sapo": {"loss_type": "sapo", **OFF_POLICY},
    # a random model moves further in one step than the distances of the papers allow in many: without a second pass
    "GSPO": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "GSPO-token": {"loss_type": "grpo", "importance_sampling_level": "sequence_token", **OFF_POLICY},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", **OFF_POLICY},
    "vespo": {"loss_type": "vespo", **OFF_POLICY},
    "gmpo": {"loss_type": "gmpo", **OFF_POLICY},
    "RLOO": RLOO,
    "RLOO, KL in the reward": {**RLOO, "beta": 0.01, "kl_placement": "reward"},
    "REINFORCE++": {"advantage_estimator": "global_zscore", "beta": 0.01, "kl_placement": "reward"},
    "REINFORCE++ with baseline": {
        "advantage_estimator": "group_center_global_std",
        "beta": 0.01,
        "kl_estimator": "k2",
        "use_bias_correction_kl": False,
    },
    "GDPO": {"multi_objective_aggregation": "normalize_then_sum"},
    "k1, weighted": {"beta": 0.04, "kl_estimator": "k1", **OFF_POLICY},
    "adaptive KL": {"beta": 0.01, "kl_target": 0.5},
    "high-entropy tokens": {"top_entropy_quantile": 0.2},
    "entropy bonus": {"entropy_coef": 0.01},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_target": 2.0},
    "dynamic sampling": {"loss_type": "dapo", "epsilon_high": 0.28, "dynamic_sampling": True},
    "prompts by variance": {"loss_type": "dapo", "prompt_sampling": "variance", **OFF_POLICY},
    "off-policy mask": {"loss_type": "grpo", "off_policy_mask_threshold": 0.5, **OFF_POLICY},
    **{
        f"corrected, {mode}": {"sampler_correction": True, "vllm_importance_sampling_mode": mode}
        for mode in CORRECTIONS
    },
}


def test_every_name_is_among_the_variants():
    said = {value for settings in VARIANTS.values() for value in settings.values() if isinstance(value, str)}
    assert set(LOSS_TYPES) <= said
    assert {*ADVANTAGES, *MULTI_REWARD_ADVANTAGES} <= said | {*SCALE_REWARDS.values()}
    assert {*KL_ESTIMATORS} <= said | {"k3"}  # the default in the loss
    assert {*RATIOS} <= said | {"token"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_learns(tmp_path, variant, seed):
    assert rewards_of_a_run(tmp_path, seed, **VARIANTS[variant])[-1] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_variant_learns_if_the_advantage_is_negated(tmp_path, variant, seed):
    assert rewards_of_a_run(tmp_path, seed, sign=-1.0, **VARIANTS[variant])[-1] < 0.4


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "bnpo"])
def test_every_loss_type_learns(tmp_path, loss_type):
    """With a reference, reused rollouts and several micro-batches, so that each of those is in the way of learning."""
    rewards = rewards_of_a_run(
        tmp_path,
        seed=0,
        loss_type=loss_type,
        beta=0.01,
        num_iterations=2,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        # Dr. GRPO divides by the largest length and not by the deviation: its gradient is smaller
        learning_rate=1e-2,
    )
    assert rewards[-1] > 0.85
