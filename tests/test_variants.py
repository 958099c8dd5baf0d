"""The fields that choose a published variant: contradictions are refused, what is probably not meant is said."""

from __future__ import annotations

import pytest

from tests.test_divergence import config

REFUSED = {
    "an unknown loss": (
        dict(loss_type="gpro"),
        "unknown loss_type 'gpro'. Did you mean 'grpo'",
    ),
    "a loss of one's own that is not there": (
        dict(loss_type="my_losses:squared"),
        "loss_type 'my_losses:squared' cannot be imported: No module named 'my_losses'",
    ),
    "a loss that is no name": (dict(loss_type=3), "loss_type=3 must be a name"),
    "an unknown ratio": (
        dict(importance_sampling_level="sequense"),
        "importance_sampling_level='sequense' is unknown. Did you mean 'sequence'.*Legal: token, sequence,",
    ),
    "a ratio of the sequence where the loss has its own": (
        dict(loss_type="vespo", importance_sampling_level="sequence"),
        "importance_sampling_level='sequence' has nothing to act on: loss_type='vespo'.*Leave it at 'token'",
    ),
    "a cap that shrinks every token": (
        dict(loss_type="cispo", epsilon_high=0.28),
        r"epsilon_high=0.28 would shrink every token.*at least 1 \(5.0 is the default\)",
    ),
    "a knob of another loss": (
        dict(loss_type="sapo", delta=2.0),
        "delta=2.0 has nothing to act on: loss_type='sapo' does not know it.*sapo_temperature_neg",
    ),
    "a temperature of 0": (
        dict(loss_type="sapo", sapo_temperature_pos=0.0),
        "sapo_temperature_pos=0.0 must be above 0",
    ),
    "a kernel that is no number": (
        dict(loss_type="vespo", vespo_k_neg=float("nan")),
        "vespo_k_neg=nan must be a finite number",
    ),
    "a clip that is text": (
        dict(loss_type="gmpo", gmpo_epsilon="0.4"),
        "gmpo_epsilon='0.4' must be a number, not str",
    ),
    "an unknown aggregation": (
        dict(loss_aggregation="token_maen"),
        "unknown loss_aggregation 'token_maen'. Did you mean 'token_mean'",
    ),
    "an advantage that is misspelt": (
        dict(advantage_estimator="leave_on_out"),
        "unknown advantage_estimator 'leave_on_out'. Did you mean 'leave_one_out'",
    ),
    "two advantages": (
        dict(advantage_estimator="leave_one_out", scale_rewards="batch"),
        "scale_rewards='batch' stands for advantage_estimator='batch_zscore'.*'leave_one_out'.*give one",
    ),
    "a scale that GDPO does not read": (
        dict(multi_objective_aggregation="normalize_then_sum", scale_rewards=False),
        "scale_rewards='none' has nothing to act on: multi_objective_aggregation='normalize_then_sum'.*at 'group'",
    ),
    "an advantage that GDPO does not read": (
        dict(
            multi_objective_aggregation="normalize_then_sum",
            advantage_estimator="group_center",
        ),
        "advantage_estimator='group_center' has nothing to act on.*at None",
    ),
    "an unknown order of rewards": (
        dict(multi_objective_aggregation="normalise_then_sum"),
        "multi_objective_aggregation='normalise_then_sum' is unknown. Did you mean 'normalize_then_sum'",
    ),
    "more than all tokens": (
        dict(top_entropy_quantile=1.2),
        r"top_entropy_quantile=1.2 must be a share of the tokens, in \[0, 1\]",
    ),
    "a target that nothing holds": (
        dict(entropy_coef=0.01, entropy_target=0.5),
        "entropy_target=0.5 has nothing to act on.*Set use_adaptive_entropy=True",
    ),
    "a weight that begins out of its bounds": (
        dict(use_adaptive_entropy=True, entropy_coef=2.0),
        "entropy_coef=2.0.*between entropy_coef_min=0.0 and entropy_coef_max=1.0",
    ),
    "a distance of 0": (
        dict(off_policy_mask_threshold=0.0),
        "off_policy_mask_threshold=0.0 must be above 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_contradictions_are_refused_with_field_numbers_and_remedy(case):
    settings, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?s){message}"):
        config(**settings)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        (dict(loss_type="luspo"), "LUSPO itself is importance_sampling_level='sequence'"),
        (dict(importance_sampling_level="sequence"), "GSPO itself is loss_type='grpo'"),
        (dict(loss_type="grpo", importance_sampling_level="sequence"), None),
        (dict(loss_type="luspo", importance_sampling_level="sequence"), None),
        (dict(beta=0.1, kl_estimator="k2"), "that of the KL itself it has with use_bias_correction_kl=False"),
        (dict(beta=0.1, kl_estimator="k1"), None),
        (dict(scale_rewards="none", advantage_estimator="group_center"), None),
        (dict(off_policy_mask_threshold=0.5), "off_policy_mask_threshold=0.5 drops nothing"),
        (dict(off_policy_mask_threshold=0.5, num_iterations=2), None),
        (dict(), None),
    ],
)
def test_what_is_legal_and_probably_not_meant_is_said(settings, word):
    notes = config(**settings).notes_on_variant()
    assert (word is None and notes == []) or (len(notes) == 1 and word in notes[0])
