"""The distances to the reference and to the sampler in a run."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from grpo_trainer.types import Completions
from tests.helpers import EOS_ID, tiny_llama
from tests.test_trainer import Scripted, count_training_passes, length_reward, logs, make


def varied(completion_ids, **_):
    return [float(sum(ids) % 7) for ids in completion_ids]


# --- the KL in the reward ---------------------------------------------------------------------------------------------


def test_the_kl_in_the_reward_is_zero_before_the_first_update_and_not_afterwards(tmp_path):
    trainer = make(tmp_path, varied, beta=0.5, kl_placement="reward", kl_target=1e-4, max_steps=4)
    trainer.train()
    assert logs(trainer, "kl")[0] == logs(trainer, "kl_penalty")[0] == 0.0
    assert max(map(abs, logs(trainer, "kl")[1:])) > 1e-6
    assert trainer.objective.beta == 0.0
    # 0 is below the target: 2 % less; what comes later is the controller's, in steps of at most 2 %
    coefficients = [0.5, *logs(trainer, "kl_coef")]
    assert coefficients[1] == pytest.approx(0.49)
    steps = [b / a for a, b in itertools.pairwise(coefficients)]
    assert all(0.98 - 1e-9 <= step <= 1.02 + 1e-9 for step in steps)


def test_a_completion_that_is_likelier_than_under_the_reference_is_pushed_down(tmp_path):
    """Equal rewards: all that tells the completions apart is what they pay."""
    trainer = make(
        tmp_path,
        lambda completions, **_: [1.0] * len(completions),
        beta=1.0,
        kl_placement="reward",
        scale_rewards="none",
        generator=Scripted((20, EOS_ID), (30, EOS_ID)),
        max_steps=1,
    )
    trainer.collector.reference._model = tiny_llama(seed=9)
    seen = []
    inner = trainer.compute_loss

    def note(model, inputs, **kwargs):
        seen.append(inputs["batch"])
        return inner(model, inputs, **kwargs)

    trainer.compute_loss = note
    trainer.train()
    (batch,) = seen
    assert batch.old_logprobs is None and batch.ref_logprobs is None
    assert batch.advantages.abs().min() > 1e-3
    assert batch.advantages[:4].sum().item() == pytest.approx(0.0, abs=1e-5)


# --- a coefficient that follows ---------------------------------------------------------------------------------------


def test_a_coefficient_in_the_loss_is_the_one_that_the_next_step_pays(tmp_path):
    """Every completion is worth the same, so that the loss is the KL term alone."""
    trainer = make(
        tmp_path,
        lambda completions, **_: [1.0] * len(completions),
        beta=0.5,
        kl_target=1e-6,
        max_steps=3,
        gradient_accumulation_steps=2,
    )
    trainer.collector.reference._model = tiny_llama(seed=9)
    trainer.train()
    loss, kl, after = (logs(trainer, name) for name in ("loss", "kl", "kl_coef"))
    assert after == pytest.approx([0.5 * 1.02, 0.5 * 1.02**2, 0.5 * 1.02**3])
    for paid, nats, beta in zip(loss, kl, [0.5, *after], strict=False):
        assert paid == pytest.approx(beta * nats, rel=1e-4)


# --- a sampler whose probabilities are not the trainer's --------------------------------------------------------------


class Tells(Scripted):
    """Draws fixed ids and says that each was so many nats less likely than the trainer finds them, in turn."""

    def __init__(self, trainer, gaps, *ids):
        super().__init__(*ids)
        self.trainer, self.gaps = trainer, gaps

    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        drawn = super().generate(prompts, num_samples, sampling, seed=seed, row_ids=row_ids)
        each = [p for p, n in zip(prompts, num_samples, strict=True) for _ in range(n)]
        told = []
        for i, (prompt, ids) in enumerate(zip(each, drawn.ids, strict=True)):
            with torch.no_grad():
                logits = self.trainer.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
            own = logits.log_softmax(-1)[range(len(ids)), list(ids)]
            told.append(tuple((own - self.gaps[i % len(self.gaps)]).tolist()))
        return Completions(ids=drawn.ids, finished=drawn.finished, sampling_logprobs=tuple(told))


def corrected(tmp_path, gaps, **settings):
    """One step on completions of two tokens, told by a sampler that is so many nats off."""
    trainer = make(tmp_path, varied, max_steps=1, gradient_checkpointing=False, **settings)
    trainer.collector.generator = Tells(trainer, gaps, (20, EOS_ID), (33, EOS_ID), (47, EOS_ID))
    gradients = []
    inner = trainer.training_step

    def note(*args, **kwargs):
        out = inner(*args, **kwargs)
        there = [p.grad.flatten().clone() for p in trainer.model.parameters() if p.grad is not None]
        gradients.append(torch.cat(there) if there else None)  # none: a micro-step that had nothing left to compute
        return out

    trainer.training_step = note
    passes = count_training_passes(trainer)
    trainer.train()
    return trainer, gradients[-1], passes


@pytest.mark.parametrize(
    ("mode", "weight"),
    # every token .1 nats likelier to the trainer: exp(.1) = 1.105171; of two tokens exp(.2) = 1.221403; bounded at 1.2
    [
        ("token_truncate", 1.105171),
        ("token_mask", 1.105171),
        ("sequence_truncate", 1.2),
        ("sequence_mask", 0.0),
        ("geometric_truncate", 1.105171),
        ("geometric_mask", 1.105171),
    ],
)
def test_the_policy_loss_is_weighted_without_a_further_pass(tmp_path, mode, weight):
    _, plain, _ = corrected(tmp_path, [0.1])
    settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": 1.2}
    trainer, gradient, passes = corrected(tmp_path, [0.1], sampler_correction=True, **settings)
    assert plain.norm() > 0
    torch.testing.assert_close(gradient, weight * plain, rtol=1e-4, atol=1e-6)
    assert passes == ["grad"]
    ratio, apart = "sampling/importance_sampling_ratio", "sampling/sampling_logp_difference"
    for figure in (f"{ratio}/min", f"{ratio}/mean", f"{ratio}/max"):
        assert logs(trainer, figure)[0] == pytest.approx(weight, rel=1e-5, abs=1e-12)
    assert logs(trainer, f"{apart}/mean")[0] == pytest.approx(0.1, rel=1e-4)
    assert logs(trainer, f"{apart}/max")[0] == pytest.approx(0.1, rel=1e-4)


def test_extremes_are_those_of_the_step(tmp_path):
    settings = {"vllm_importance_sampling_mode": "geometric_truncate", "per_device_train_batch_size": 4}
    gaps = [0.5, -0.25, 0.0, 0.1]
    trainer, *_ = corrected(tmp_path, gaps, sampler_correction=True, gradient_accumulation_steps=2, **settings)
    ratio = "sampling/importance_sampling_ratio"
    assert logs(trainer, f"{ratio}/max")[0] == pytest.approx(1.648721, rel=1e-4)  # exp(.5)
    assert logs(trainer, f"{ratio}/min")[0] == pytest.approx(0.778801, rel=1e-4)  # exp(-.25)
    assert logs(trainer, "sampling/sampling_logp_difference/max")[0] == pytest.approx(0.5, rel=1e-4)


def test_nothing_is_kept_of_the_sampler_where_nothing_is_corrected(tmp_path):
    trainer, *_ = corrected(tmp_path, [0.1])
    assert not [name for entry in trainer.state.log_history for name in entry if name.startswith("sampling/")]


def test_the_engines_own_log_probs_are_close_to_the_trainers(tmp_path):
    trainer = make(tmp_path, varied, sampler_correction=True, temperature=0.7)
    trainer.train()
    apart = logs(trainer, "sampling/sampling_logp_difference/max")
    assert len(apart) == 2 and 0 <= max(apart) < 1e-4
    assert logs(trainer, "sampling/importance_sampling_ratio/mean") == pytest.approx([1.0, 1.0], abs=1e-4)


def test_a_rollout_that_outlives_its_step_compares_the_sampler_with_the_old_policy(tmp_path):
    trainer = make(tmp_path, varied, sampler_correction=True, num_iterations=2, learning_rate=0.1)
    trainer.train()
    apart = logs(trainer, "sampling/sampling_logp_difference/max")
    assert len(apart) == 2 and max(apart) < 1e-4  # also after the update, whose policy is elsewhere


def test_rows_without_an_advantage_are_left_out_as_ever(tmp_path):
    trainer = make(tmp_path, length_reward, sampler_correction=True)
    batch = trainer.collector.collect([{"prompt": "a"}, {"prompt": "b"}], [4, 4], seed=1).batch
    batch = dataclasses.replace(batch, advantages=torch.tensor([1.0, -1.0, *[0.0] * 6]))
    assert batch.sampling_logprobs is not None
    assert len(trainer.objective.live_rows(batch)) == 2
    compares = dataclasses.replace(trainer.objective, compares_with_sampler=True)  # whose weight is 1 for none of them
    assert compares.live_rows(batch) == list(range(len(batch)))


def test_a_generator_that_tells_nothing_is_refused(tmp_path):
    trainer = make(tmp_path, sampler_correction=True, generator=Scripted((20, EOS_ID)))
    with pytest.raises(ValueError, match="needs the log-probs of the sampler, and Scripted gave none"):
        trainer.train()
