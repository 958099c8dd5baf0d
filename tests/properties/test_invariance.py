"""The gradient of a step does not depend on how the step is cut, padded or ordered."""

from __future__ import annotations

import pytest
import torch

from grpo_trainer.objective import LOSS_TYPES, build_objective
from grpo_trainer.policy.scoring import completion_logprobs
from grpo_trainer.types import RolloutBatch
from tests.helpers import tiny_gpt2, tiny_llama

LENGTHS = (5, 1, 0, 2, 3, 3, 7, 8)  # one empty completion
GROUP = 4
INVARIANT = [name for name in LOSS_TYPES if name != "bnpo"]


def make_batch(seed=0):
    """Two prompts of different length with four completions each; the last row is credited only in part."""
    draw = torch.Generator().manual_seed(seed)
    width = max(LENGTHS)
    within = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    mask = within.clone()
    mask[-1, 0] = False

    def noise(scale):
        return torch.randn(len(LENGTHS), width, generator=draw) * scale * within

    return RolloutBatch(
        prompt_ids=tuple(torch.randint(4, 200, (n,), generator=draw) for n in (3, 9)),
        prompt_of_row=(0,) * GROUP + (1,) * GROUP,
        lengths=LENGTHS,
        completion_ids=torch.randint(4, 200, (len(LENGTHS), width), generator=draw) * within,
        mask=mask,
        advantages=torch.randn(len(LENGTHS), generator=draw),
        old_logprobs=(-5.5 + noise(0.3)) * within,
        ref_logprobs=(-5.5 + noise(0.3)) * within,
    )


def gradient(model, loss_type, batches):
    """The gradient of one optimizer step whose micro-batches are given: sum of losses over the sum of items."""
    objective = build_objective(loss_type=loss_type, scale_rewards="group", max_completion_length=16, beta=0.3)
    items = sum(objective.items(batch) for batch in batches)
    model.zero_grad()
    for batch in batches:
        (objective(completion_logprobs(model, batch, temperature=0.8).logprobs, batch).loss / items).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def assert_close(a, b, relative=1e-5):
    assert b.norm() > 0
    assert (a - b).norm() <= relative * b.norm()


def cut(batch, size):
    return [batch.select(range(i, i + size)) for i in range(0, len(batch), size)]


@pytest.mark.parametrize("loss_type", INVARIANT)
@pytest.mark.parametrize("size", [4, 2, 1])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_gradient_does_not_depend_on_the_split(loss_type, size, build):
    model, batch = build(), make_batch()
    assert_close(gradient(model, loss_type, cut(batch, size)), gradient(model, loss_type, [batch]))


def test_the_one_documented_exception_does_depend_on_the_split():
    model, batch = tiny_llama(), make_batch()
    whole, halves = gradient(model, "bnpo", [batch]), gradient(model, "bnpo", cut(batch, 4))
    assert (whole - halves).norm() > 0.01 * whole.norm()


@pytest.mark.parametrize("loss_type", [*INVARIANT, "bnpo"])
def test_order_of_rows_and_groups_does_not_matter(loss_type):
    model, batch = tiny_llama(), make_batch()
    mixed = batch.select([6, 0, 3, 5, 1, 7, 2, 4])
    assert_close(gradient(model, loss_type, [mixed]), gradient(model, loss_type, [batch]))


@pytest.mark.parametrize("loss_type", [*INVARIANT, "bnpo"])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_padding_does_not_matter(loss_type, build):
    model, batch = build(), make_batch()
    pad = torch.nn.functional.pad
    wide = RolloutBatch(
        prompt_ids=batch.prompt_ids,
        prompt_of_row=batch.prompt_of_row,
        lengths=batch.lengths,
        completion_ids=pad(batch.completion_ids, (0, 5), value=7),
        mask=pad(batch.mask, (0, 5)),
        advantages=batch.advantages,
        old_logprobs=pad(batch.old_logprobs, (0, 5), value=-1e30),
        ref_logprobs=pad(batch.ref_logprobs, (0, 5), value=1e30),
    )
    assert_close(gradient(model, loss_type, [wide]), gradient(model, loss_type, [batch]))


@pytest.mark.parametrize("loss_type", INVARIANT)
def test_rows_without_advantage_and_kl_contribute_nothing_but_their_count(loss_type):
    """Half of the rows have advantage 0: the gradient is that of the other half, with the same normaliser."""
    model, batch = tiny_llama(), make_batch()
    objective = build_objective(loss_type=loss_type, scale_rewards="group", max_completion_length=16)
    silent = torch.arange(len(batch)) % 2 == 0
    batch.advantages[silent] = 0.0
    live = batch.select([i for i in range(len(batch)) if not silent[i]])

    def grad(part):
        model.zero_grad()
        logprobs = completion_logprobs(model, part).logprobs
        (objective(logprobs, part).loss / objective.items(batch)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    assert_close(grad(batch), grad(live))


def test_rewards_times_ten_leave_scaled_advantages_and_multiply_unscaled_ones():
    """z-scores: x / (s + 1e-4) against 10 x / (10 s + 1e-4), a relative change below 1e-4 / s, here 1e-3."""
    rewards = torch.tensor([[0.1, 0.4, 0.3, 0.9], [0.0, 0.2, 0.5, 0.6]])
    for scale, factor in (("group", 1.0), ("batch", 1.0), ("none", 10.0)):
        advantage = build_objective(loss_type="dapo", scale_rewards=scale, max_completion_length=8).advantage
        torch.testing.assert_close(advantage(10 * rewards), factor * advantage(rewards), rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(advantage(rewards + 5), advantage(rewards), rtol=1e-4, atol=1e-5)
