"""The gradient of a whole step is the slope of its loss: central differences in float64 on a model of two layers.

The step is the trainer's own: rollout, dealing out, several micro-batches, the divisor over all of them, the KL to the
reference, the entropy bonus, and what is left out because it carries no gradient. The weights are moved after the
rollout, so that no ratio is 1, and then each way along directions in the space of all parameters.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from tests.helpers import tiny_gpt2, tiny_tokenizer

STEP = 1e-5
TWICE = {"num_iterations": 2}  # so that there are old log-probs, and a ratio
# Losses whose gradient is that of their value; the others hold a weight constant, see below.
CASES = {
    "dapo": {**TWICE},
    "grpo, KL, entropy bonus": {**TWICE, "loss_type": "grpo", "beta": 0.3, "entropy_coef": 0.2},
    "dr_grpo, KL without the ratio": {
        **TWICE,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "beta": 0.3,
        "use_bias_correction_kl": False,
    },
    "GSPO, its KL": {**TWICE, "loss_type": "grpo", "importance_sampling_level": "sequence", "beta": 0.3},
    "luspo, k1": {
        **TWICE,
        "loss_type": "luspo",
        "importance_sampling_level": "sequence",
        "beta": 0.3,
        "kl_estimator": "k1",
    },
    "sapo, k2, entropy bonus": {**TWICE, "loss_type": "sapo", "beta": 0.3, "kl_estimator": "k2", "entropy_coef": 0.1},
    "gmpo, two-sided bounds": {**TWICE, "loss_type": "gmpo", "gmpo_epsilon": 0.02, "gmpo_epsilon_high": 0.03},
    "bnpo, high-entropy tokens with a bonus": {
        **TWICE,
        "loss_type": "bnpo",
        "top_entropy_quantile": 0.5,
        "entropy_coef": 0.2,
    },
    "dapo, KL in the reward, entropy bonus": {**TWICE, "beta": 0.3, "kl_placement": "reward", "entropy_coef": 0.1},
    "corrected, off-policy mask": {
        **TWICE,
        "loss_type": "grpo",
        "sampler_correction": True,
        "vllm_importance_sampling_mode": "token_truncate",
        "off_policy_mask_threshold": 0.01,
        "beta": 0.3,
    },
}
# Their gradient is a constant weight times that of the log-prob: along a direction, the sum of weight * slope.
WEIGHTED = {
    "cispo": {**TWICE, "loss_type": "cispo"},
    "vespo": {**TWICE, "loss_type": "vespo", "beta": 0.3},
    "reinforce": {**TWICE, "loss_type": "reinforce", "advantage_estimator": "leave_one_out"},
}


def reward(completion_ids, **kwargs):
    return [float(sum(ids) % 5) + len(ids) for ids in completion_ids]


def step_of(tmp_path, settings):
    """A trainer, and the micro-batches and the divisor of a step whose rollout was drawn with other weights."""
    config = GRPOConfig(
        str(tmp_path),
        **{
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_generations": 4,
            "max_completion_length": 5,
            "max_steps": 4,
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "seed": 3,
            **settings,
        },
    )
    model = tiny_gpt2(n_embd=16, n_head=2).double()  # a llama rounds its norms to float32, whatever its weights are
    rows = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three", "four")])
    trainer = GRPOTrainer(model, reward, config, rows, processing_class=tiny_tokenizer())
    if trainer.collector.reference is not None:
        move(trainer.collector.reference._model, 0.05, seed=5)  # a reference that is elsewhere
    loader = iter(trainer.get_train_dataloader())
    inputs, items = trainer.get_batch_samples(itertools.chain(loader), 2, torch.device("cpu"))
    move(model, 0.02, seed=6)
    return trainer, inputs, items


def move(model, scale, seed):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += scale * torch.randn(p.shape, generator=draw, dtype=torch.float64).to(p.dtype)


def loss_of(trainer, inputs, items):
    return sum(
        trainer.compute_loss(trainer.model, {"batch": part}, num_items_in_batch=items)
        for micro_step in inputs
        for part in micro_step["parts"]
    )


def directions(model, count=4):
    draw = torch.Generator().manual_seed(11)
    for _ in range(count):
        way = [torch.randn(p.shape, generator=draw, dtype=torch.float64) for p in model.parameters()]
        norm = torch.cat([w.flatten() for w in way]).norm()
        yield [w / norm for w in way]


def slope(model, way, value):
    """Central differences of a value along a direction; the weights are put back."""
    ends = []
    parameters = list(model.parameters())
    kept = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for sign in (1.0, -1.0):
            for p, k, w in zip(parameters, kept, way, strict=True):
                p.copy_(k + sign * STEP * w)
            ends.append(value())
        for p, k in zip(parameters, kept, strict=True):
            p.copy_(k)
    return (ends[0] - ends[1]) / (2 * STEP)


def gradient_along(model, way, gradient):
    return sum((g * w).sum() for g, w in zip(gradient, way, strict=True) if g is not None).item()


def whole_gradient(trainer, inputs, items):
    loss = loss_of(trainer, inputs, items)
    assert loss.dtype == torch.float64
    return torch.autograd.grad(loss, list(trainer.model.parameters()), allow_unused=True)


@pytest.mark.parametrize("case", CASES)
def test_the_gradient_is_the_slope_of_the_loss(case, tmp_path):
    trainer, inputs, items = step_of(tmp_path, CASES[case])
    gradient = whole_gradient(trainer, inputs, items)
    size = torch.cat([g.flatten() for g in gradient if g is not None]).norm().item()
    assert size > 1e-2
    for way in directions(trainer.model):
        expected = slope(trainer.model, way, lambda: loss_of(trainer, inputs, items).item())
        got = gradient_along(trainer.model, way, gradient)
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-7 * size)


@pytest.mark.parametrize("case", WEIGHTED)
def test_a_constant_weight_times_the_slope_of_the_log_prob(case, tmp_path):
    """The weights are taken once, where the gradient is, and the sum of weight * log-prob has that gradient."""
    trainer, inputs, items = step_of(tmp_path, WEIGHTED[case])
    gradient = whole_gradient(trainer, inputs, items)
    inner, weights, calls = trainer.objective.policy_loss, [], itertools.count()

    def held(logprobs, old, advantages, mask):
        """The loss with its weight of the first time round: slope by log-prob, found by autograd in that place only."""
        n = next(calls) % len(inputs)
        if len(weights) <= n:
            with torch.enable_grad():
                leaf = logprobs.detach().requires_grad_()
                (w,) = torch.autograd.grad(inner(leaf, old, advantages, mask).loss.sum(), leaf)
            weights.append(w)
        return type(inner(logprobs, old, advantages, mask))(weights[n] * logprobs, {})

    trainer.objective = dataclasses.replace(trainer.objective, policy_loss=held)
    with torch.no_grad():
        loss_of(trainer, inputs, items)
    for way in directions(trainer.model):
        expected = slope(trainer.model, way, lambda: loss_of(trainer, inputs, items).item())
        assert gradient_along(trainer.model, way, gradient) == pytest.approx(expected, rel=1e-5, abs=1e-7)
