"""The fields about the distance to the reference and to the sampler: what they stand for, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest

from grpo_trainer import GRPOConfig
from grpo_trainer.assembly import kl_coefficient_of, objective_of
from grpo_trainer.functional.correction import CORRECTIONS
from grpo_trainer.functional.kl import KL_ESTIMATORS


def config(**settings):
    return GRPOConfig(
        "out", **{"num_generations": 4, "per_device_train_batch_size": 4, "report_to": "none", **settings}
    )


@pytest.mark.parametrize("placement", ["loss", "reward"])
@pytest.mark.parametrize("estimator", [None, *KL_ESTIMATORS])
def test_the_price_stands_in_one_place_and_the_estimator_is_the_usual_one_there(placement, estimator):
    args = config(beta=0.3, kl_placement=placement, kl_estimator=estimator)
    objective = objective_of(args)
    assert objective.beta == (0.3 if placement == "loss" else 0.0)
    assert objective.kl is KL_ESTIMATORS[estimator or {"loss": "k3", "reward": "k1"}[placement]]
    assert kl_coefficient_of(args).beta == 0.3 and not kl_coefficient_of(args).adaptive


def test_a_target_lets_beta_follow():
    coefficient = kl_coefficient_of(config(beta=0.3, kl_target=0.05, kl_gain=0.2))
    assert (coefficient.beta, coefficient.target, coefficient.gain) == (0.3, 0.05, 0.2)


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_a_correction_is_chosen_by_the_names_of_trl_and_off_by_default(mode):
    assert objective_of(config()).correction is None
    made = objective_of(
        config(
            sampler_correction=True,
            vllm_importance_sampling_mode=mode,
            vllm_importance_sampling_clip_max=2.0,
            vllm_importance_sampling_clip_min=0.5,
        )
    ).correction
    assert (made.func, made.keywords) == (CORRECTIONS[mode], {"clip_max": 2.0, "clip_min": 0.5})


def test_the_defaults_are_those_of_trl():
    made = objective_of(config(sampler_correction=True)).correction
    assert (made.func, made.keywords) == (CORRECTIONS["sequence_mask"], {"clip_max": 3.0, "clip_min": None})
    assert objective_of(config(vllm_importance_sampling_correction=False)).correction is None  # it is about vLLM


def test_the_old_name_of_a_bound_is_taken_and_said():
    with pytest.warns(FutureWarning, match="old name of vllm_importance_sampling_clip_max"):
        made = config(sampler_correction=True, vllm_importance_sampling_cap=2.0)
    assert (made.vllm_importance_sampling_clip_max, made.vllm_importance_sampling_cap) == (2.0, None)
    assert dataclasses.replace(made, seed=1).vllm_importance_sampling_clip_max == 2.0


CORRECTED = {"sampler_correction": True}
REFUSED = {
    "an estimator of nothing": (
        dict(kl_estimator="k2"),
        "kl_estimator='k2' has nothing to act on: beta=0.0",
    ),
    "an estimator that is misspelt": (
        dict(beta=0.1, kl_estimator="k4"),
        "unknown kl_estimator 'k4'",
    ),
    "an estimator that pulls at nothing": (
        dict(beta=0.1, kl_estimator="k1", use_bias_correction_kl=False),
        "kl_estimator='k1' with use_bias_correction_kl=False would pull at nothing.*Set use_bias_correction_kl=True",
    ),
    "a placement that is misspelt": (
        dict(beta=0.1, kl_placement="rewards"),
        "kl_placement='rewards' is unknown. Did you mean 'reward'",
    ),
    "a placement of nothing": (dict(kl_placement="reward"), "kl_placement='reward' has nothing to act on: beta=0.0"),
    "a target of nothing": (dict(kl_target=0.1), "kl_target=0.1 has nothing to act on: beta=0.0.*Set beta above 0"),
    "a target of 0": (dict(beta=0.1, kl_target=0.0), "kl_target=0.0 must be above 0"),
    "a target that is text": (dict(beta=0.1, kl_target="0.1"), "kl_target='0.1' must be a number, not str"),
    "a gain without a target": (dict(beta=0.1, kl_gain=0.5), "kl_gain=0.5 has nothing to act on.*Set kl_target"),
    "a price on a sum that is never taken": (
        dict(beta=0.1, kl_placement="reward", multi_objective_aggregation="normalize_then_sum"),
        "kl_placement='reward' takes the KL off the weighted sum.*'normalize_then_sum'.*Leave kl_placement at 'loss'",
    ),
    "a mode that is misspelt": (
        dict(**CORRECTED, vllm_importance_sampling_mode="token_mas"),
        "unknown vllm_importance_sampling_mode 'token_mas'. Did you mean 'token_mask'",
    ),
    "a mode of nothing": (
        dict(vllm_importance_sampling_mode="token_mask"),
        "vllm_importance_sampling_mode='token_mask' has nothing to act on.*Set sampler_correction=True",
    ),
    "bounds without room": (
        dict(**CORRECTED, vllm_importance_sampling_clip_max=1.0, vllm_importance_sampling_clip_min=1.0),
        "vllm_importance_sampling_clip_min=1.0 must be below vllm_importance_sampling_clip_max=1.0",
    ),
    "a bound of 0": (
        dict(**CORRECTED, vllm_importance_sampling_clip_max=0.0),
        "vllm_importance_sampling_clip_max=0.0 must be above 0",
    ),
    "nothing to truncate at": (
        dict(
            **CORRECTED,
            vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=None,
        ),
        "vllm_importance_sampling_mode='token_truncate' has nothing to truncate at",
    ),
    "a correction that the loss takes the place of": (
        dict(**CORRECTED, loss_type="vespo", vllm_importance_sampling_mode="token_mask"),
        "vllm_importance_sampling_mode='token_mask' has nothing to act on: loss_type='vespo' weighs completions",
    ),
    "a sampler that tells nothing": (
        dict(**CORRECTED, generation_engine="generate"),
        "sampler_correction=True needs the log-probs of the sampler.*Set generation_engine='group'",
    ),
    "a sampler with another distribution": (dict(**CORRECTED, top_p=0.9), "top_p=0.9 changes the former"),
    "a sampler that is told of repetitions": (
        dict(**CORRECTED, generation_kwargs={"repetition_penalty": 1.1}),
        "repetition_penalty=1.1 changes the former",
    ),
    "a sampler with a rule of its own": (
        dict(**CORRECTED, generation_kwargs={"typical_p": 0.9}),
        "typical_p=0.9 changes the former.*Leave out typical_p, or sampler_correction",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_with_field_numbers_and_remedy(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        config(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        dict(**CORRECTED, loss_type="vespo"),
        dict(**CORRECTED, top_p=1, min_p=0.0, generation_kwargs={"top_k": 0}),
        dict(beta=0.1, kl_placement="reward", use_bias_correction_kl=False),
        dict(beta=0.1, kl_placement="reward", kl_target=0.1, advantage_estimator="leave_one_out"),
    ],
)
def test_what_belongs_together_is_taken(settings):
    assert config(**settings).notes_on_variant() == []


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_an_estimator_that_pulls_elsewhere_in_the_reward_is_said(estimator):
    (note,) = config(beta=0.1, kl_placement="reward", kl_estimator=estimator).notes_on_variant()
    assert "in the reward only k1 does" in note
