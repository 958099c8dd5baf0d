"""TRL's gradients and ours are the same also with a sampler's correction, and with the KL in the reward."""

from __future__ import annotations

import contextlib
import io

import pytest
import trl
from transformers import AutoModelForCausalLM

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.types import Completions
from tests.helpers import EOS_ID, tiny_tokenizer
from tests.properties.test_peer_gradients import COMMON, Recorder, checkpoint, completion, reward, rows

__all__ = ["checkpoint"]  # a fixture

MODE = "vllm_importance_sampling_mode"
HIGH, LOW = "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"
CORRECTED = {
    "token_truncate": {MODE: "token_truncate", HIGH: 1.1},
    "token_mask": {MODE: "token_mask", HIGH: 1.1, LOW: 0.9, "loss_type": "grpo"},
    "sequence_truncate": {MODE: "sequence_truncate", HIGH: 1.2, LOW: 0.8, "beta": 0.2},
    "sequence_mask, twice": {MODE: "sequence_mask", HIGH: 1.2, "num_iterations": 2, "learning_rate": 0.01},
}


def told(ids):
    """What the sampler says of each token: an untrained model finds each about as likely, -log 256."""
    return [-5.545 + (token % 9 - 4) / 20 for token in ids]


class Fixed:
    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        ids = [completion(p, place) for p, n in zip(prompts, num_samples, strict=True) for place in range(n)]
        return Completions(
            ids=tuple(map(tuple, ids)),
            finished=tuple(row[-1] == EOS_ID for row in ids),
            sampling_logprobs=tuple(tuple(told(row)) for row in ids),
        )


def ours(checkpoint, config):
    recorder = Recorder()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    trainer = GRPOTrainer(model, reward, config, rows(), processing_class=tiny_tokenizer(), callbacks=[recorder])
    trainer.collector.generator = Fixed()
    return run(trainer, recorder)


def run(trainer, recorder):
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    return recorder.gradients, trainer.state.log_history


def assert_same(a, b):
    assert len(a) == len(b) > 0
    for step, (got, expected) in enumerate(zip(a, b, strict=True)):
        assert expected.norm() > 0
        error = ((got - expected).norm() / expected.norm()).item()
        assert error <= 1e-5, f"step {step}: relative difference {error:.1e}"


SLOW = {"token_mask", "sequence_truncate"}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c in SLOW else ()) for c in CORRECTED])
def test_a_corrected_gradient_agrees_with_trl(case, checkpoint, tmp_path):
    settings = {**COMMON, **CORRECTED[case], "per_device_train_batch_size": 8, "logging_steps": 1}
    recorder = Recorder()
    theirs = trl.GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(checkpoint),
        reward,
        trl.GRPOConfig(str(tmp_path / "trl"), **settings),
        rows(),
        processing_class=tiny_tokenizer(),
        callbacks=[recorder],
    )

    def generate(prompt_ids, *args, **kwargs):
        ids = [completion(p, i % 4) for i, p in enumerate(prompt_ids)]
        return ids, [told(row) for row in ids]

    theirs._generate_single_turn = generate
    theirs.use_vllm = True  # there is none, but what follows generation is as if there was
    expected, their_log = run(theirs, recorder)
    got, our_log = ours(checkpoint, GRPOConfig(str(tmp_path / "ours"), sampler_correction=True, **settings))
    assert_same(got, expected)
    figures = {name for name in their_log[0] if name.startswith("sampling/")}
    assert len(figures) == 5
    if case in ("token_truncate", "token_mask", "sequence_mask, twice"):
        return  # the figures are of the rows that are computed: without a KL term not of those that have no advantage
    for a, b in zip(our_log, their_log, strict=True):
        for name in figures & set(b):
            assert a[name] == pytest.approx(b[name], rel=1e-4), name


def test_the_kl_in_the_reward_is_that_of_trls_rloo(checkpoint, tmp_path):
    """On policy its clipped ratio is 1, so that its loss has the gradient of the plain one."""
    settings = {**COMMON, "beta": 0.2, "per_device_train_batch_size": 8, "learning_rate": 0.05}
    recorder = Recorder()
    theirs = trl.RLOOTrainer(
        AutoModelForCausalLM.from_pretrained(checkpoint),
        reward,
        trl.RLOOConfig(str(tmp_path / "trl"), **settings),
        rows(),
        processing_class=tiny_tokenizer(),
        callbacks=[recorder],
    )
    theirs._generate_single_turn = lambda prompt_ids, *args, **kwargs: [
        completion(p, i % 4) for i, p in enumerate(prompt_ids)
    ]
    expected, _ = run(theirs, recorder)
    rloo = {"loss_type": "reinforce", "advantage_estimator": "leave_one_out", "kl_placement": "reward"}
    got, log = ours(checkpoint, GRPOConfig(str(tmp_path / "ours"), logging_steps=1, **rloo, **settings))
    assert_same(got, expected)
    assert abs(log[1]["kl_penalty"]) > 1e-3  # it has left the reference, and pays
