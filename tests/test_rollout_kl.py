"""The KL in the reward: what each completion of a rollout pays, and what the advantage is then of."""

from __future__ import annotations

import pytest
import torch

from grpo_trainer.functional.advantages import group_center
from grpo_trainer.functional.kl import k1
from grpo_trainer.policy.kl_coefficient import KLCoefficient
from grpo_trainer.policy.scoring import completion_logprobs
from tests import helpers
from tests.test_rollout import FINISHED, ROWS, SCORES, TEXTS, Fake, Frozen, collect, collector, figures, gives

__all__ = ["collector"]  # a fixture


@pytest.fixture
def priced(collector):
    """A collector whose completions pay 0.5 per nat, and its policy and reference."""
    policy, reference = helpers.tiny_llama(seed=1), helpers.tiny_llama(seed=2)

    def build(*functions, **parts):
        settings = {
            "policy": lambda: policy,
            "reference": Frozen(reference),
            "advantage": group_center,
            "kl_in_reward": k1,
            "kl_coefficient": KLCoefficient(beta=0.5),
        }
        return collector(*functions, **{**settings, **parts})

    return build, policy, reference


def paid_by_hand(batch, policy, reference):
    """Half of log pi(o) - log pi_ref(o), over all tokens of each completion."""
    ours, theirs = (completion_logprobs(m, batch, temperature=0.7).logprobs for m in (policy, reference))
    return [0.5 * (ours[i, :n].sum() - theirs[i, :n].sum()).item() for i, n in enumerate(batch.lengths)]


@pytest.mark.parametrize("masked", [False, True])
def test_each_completion_pays_for_its_tokens_before_the_advantage(priced, masked):
    build, policy, reference = priced
    built = build(mask_truncated=masked)  # what is cut is masked in the loss and pays all the same
    batch = collect(built).batch
    paid = paid_by_hand(batch, policy, reference)
    assert max(map(abs, paid)) > 0.1 and paid[7] == 0.0  # the last is empty
    for group in (slice(0, 4), slice(4, 8)):
        net = [score - price for score, price in zip(SCORES[group], paid[group], strict=True)]
        expected = [value - sum(net) / 4 for value in net]
        assert batch.advantages[group].tolist() == pytest.approx(expected, abs=1e-5)
    got = figures(built)
    assert got["kl_penalty"] == pytest.approx(sum(paid) / 8, abs=1e-6)
    assert got["kl"] == pytest.approx(sum(paid) / 0.5 / sum(batch.lengths), abs=1e-6)
    assert got["reward"] == sum(SCORES) / 8  # what the functions said
    assert got["frac_reward_zero_std"] == 0.5


def test_the_loss_gets_no_term_of_its_own_and_the_ratio_stays_exactly_one(priced):
    build, *_ = priced
    batch = collect(build()).batch
    assert batch.old_logprobs is None and batch.ref_logprobs is None
    batch = collect(build(keep_old_logprobs=True)).batch
    assert batch.old_logprobs is not None and batch.ref_logprobs is None


def test_a_completion_without_a_reward_pays_nothing_that_matters(priced):
    build, *_ = priced
    advantages = collect(build(gives(1, None, 3, 2, None, None, None, None))).batch.advantages
    assert advantages[[1, 4, 5, 6, 7]].tolist() == [0.0] * 5 and advantages[[0, 2, 3]].all()


def test_what_was_paid_is_what_the_coefficient_is_moved_by(priced):
    build, policy, reference = priced
    coefficient = KLCoefficient(beta=0.5, target=1e-3)
    batch = collect(build(kl_coefficient=coefficient)).batch
    kl = sum(paid_by_hand(batch, policy, reference)) / 0.5 / sum(batch.lengths)
    assert coefficient.beta == 0.5  # not within the rollout
    coefficient.end_step()
    assert coefficient.beta == pytest.approx(0.5 * (1.02 if kl > 1.2e-3 else 0.98))


def test_over_processes_every_completion_has_the_price_of_its_own(priced, tiny_tokenizer):
    """Two processes with a group each; what the first one tells is played to the second."""
    build, *_ = priced
    whole = collect(build()).batch.advantages
    told = []

    def collect_alone(rank, gather):
        mine = slice(4 * rank, 4 * rank + 4)
        built = build(
            gives(*SCORES[mine]),
            generator=Fake(tiny_tokenizer, TEXTS[mine], FINISHED[mine]),
            rank=rank,
            layout=[range(4), range(4, 8)],
            gather=gather,
        )
        return built.collect(ROWS[rank : rank + 1], [4], seed=11).batch

    collect_alone(0, lambda tensor: told.append(tensor) or torch.cat([tensor, tensor]))
    batch = collect_alone(1, lambda tensor: torch.cat([told.pop(0), tensor]))
    assert torch.allclose(batch.advantages, whole[4:], atol=1e-6) and batch.advantages.all()
