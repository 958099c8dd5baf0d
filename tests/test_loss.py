"""The loss of a micro-batch: what each term adds, what is left out, and what nothing may depend on."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_trainer.functional.losses import TokenLoss
from grpo_trainer.loss import masked_sum
from grpo_trainer.objective import LOSS_TYPES, build_objective, knobs_of
from grpo_trainer.types import RolloutBatch

INVARIANT = [name for name in LOSS_TYPES if name != "bnpo"]
NAN = math.nan


def build(loss_type="grpo", **knobs):
    return build_objective(**{"loss_type": loss_type, "scale_rewards": "group", "max_completion_length": 8, **knobs})


def rows_of(*lengths: int, advantages=None, pads: int = 0, old=None, ref=None) -> RolloutBatch:
    """Rows of given lengths; old and reference log-probs as (B, T) tensors."""
    width = max(lengths) + pads

    def wide(values):
        return None if values is None else torch.nn.functional.pad(values, (0, width - values.shape[1]))

    return RolloutBatch(
        prompt_ids=(torch.tensor([1]),),
        prompt_of_row=(0,) * len(lengths),
        lengths=lengths,
        completion_ids=torch.zeros(len(lengths), width, dtype=torch.long),
        mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        advantages=torch.tensor(advantages or [0.0] * len(lengths)),
        old_logprobs=wide(old),
        ref_logprobs=wide(ref),
    )


def loss_of(objective, logprobs, *batches) -> tuple[float, torch.Tensor]:
    """The loss of an optimizer step and its gradient; each batch takes its rows of ``logprobs`` in turn."""
    logprobs = logprobs.clone().requires_grad_()
    items = sum(objective.items(b).item() for b in batches)
    total, start = torch.zeros(()), 0
    for b in batches:
        total = total + objective(logprobs[start : start + len(b), : b.mask.shape[1]], b).loss / items
        start += len(b)
    return total.item(), torch.autograd.grad(total, logprobs)[0]


# --- how a step is cut ------------------------------------------------------------------------------------------------


def some_step() -> tuple[torch.Tensor, RolloutBatch]:
    logprobs, old, ref = (-torch.rand(8, 5) for _ in range(3))
    batch = rows_of(1, 5, 2, 3, 4, 0, 5, 1, advantages=[3.0, -1.0, 0.5, 2.0, -2.5, 1.0, 0.1, -0.7], old=old, ref=ref)
    return logprobs, batch


@pytest.mark.parametrize("loss_type", INVARIANT)
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_the_gradient_does_not_depend_on_how_the_step_is_cut(loss_type, parts):
    logprobs, batch = some_step()
    objective = build(loss_type, beta=0.1)
    loss, gradient = loss_of(objective, logprobs, batch)
    cut = [batch.select(range(i, i + 8 // parts)) for i in range(0, 8, 8 // parts)]
    again, same = loss_of(objective, logprobs, *cut)
    assert again == pytest.approx(loss, rel=1e-5)
    assert torch.allclose(same, gradient, rtol=1e-5, atol=1e-8)


def test_bnpo_alone_depends_on_how_the_step_is_cut():
    # A = -1 on one token, A = -3 on three: 10 / 4 whole, (1 + 3) / 2 in two micro-batches
    batch = rows_of(1, 3, advantages=[-1.0, -3.0])
    logprobs = torch.zeros(2, 3)
    assert loss_of(build("bnpo"), logprobs, batch)[0] == pytest.approx(2.5)
    assert loss_of(build("bnpo"), logprobs, batch.select([0]), batch.select([1]))[0] == pytest.approx(2.0)


@pytest.mark.parametrize("loss_type", ["grpo", "dapo", "dr_grpo", "luspo", "gmpo"])
def test_equal_lengths_on_policy_have_no_loss_but_a_gradient(loss_type):
    objective = build(loss_type)
    centred = objective.advantage(torch.tensor([[1.0, 0.0, 3.0]]))[0].tolist()
    loss, gradient = loss_of(objective, -torch.rand(3, 2), rows_of(2, 2, 2, advantages=centred))
    assert abs(loss) < 1e-6
    assert gradient.norm() > 0.01
    silent = objective.advantage(torch.tensor([[0.1, 0.1, 0.1]]))[0].tolist()
    assert loss_of(objective, -torch.rand(3, 2), rows_of(2, 2, 2, advantages=silent))[1].norm() == 0


# --- the KL term ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.04, 0.5])
def test_without_advantages_the_loss_is_beta_times_the_kl_that_is_logged(beta):
    logprobs, ref = torch.zeros(1, 3), torch.tensor([[0.5, -0.5, 0.0]])
    out = build("dapo", beta=beta)(logprobs, rows_of(3, ref=ref))
    total, count = (v.item() for v in out.stats["kl"])
    # .148721 + .106531 + 0 over three tokens
    assert total / count == pytest.approx(0.255252 / 3, rel=1e-5)
    assert out.loss.item() / 3 == pytest.approx(beta * 0.255252 / 3, rel=1e-5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_padding_does_not_change_the_price_of_kl(loss_type):
    logprobs, batch = some_step()
    loss, gradient = loss_of(build(loss_type, beta=0.1), logprobs, batch)
    pad = torch.nn.functional.pad
    wide = rows_of(
        *batch.lengths, pads=5, advantages=batch.advantages.tolist(), old=batch.old_logprobs, ref=batch.ref_logprobs
    )
    again, same = loss_of(build(loss_type, beta=0.1), pad(logprobs, (0, 5), value=-7.0), wide)
    assert again == pytest.approx(loss, rel=1e-6)
    assert torch.equal(same, pad(gradient, (0, 5)))


def test_one_step_of_descent_brings_the_policy_nearer_to_the_reference():
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()

    def kl() -> torch.Tensor:
        logp = logits.log_softmax(0)
        return (logp.exp() * (logp - ref)).sum()

    before = kl().item()
    # every token once; each counts with its probability, which is the expectation under the policy
    p = logits.detach().softmax(0)
    step = torch.zeros(())
    for v in range(3):
        step = (
            step
            + p[v]
            * build("dapo", beta=1.0)(logits.log_softmax(0)[v].reshape(1, 1), rows_of(1, ref=ref[v : v + 1, None])).loss
        )
    gradient = torch.autograd.grad(step, logits)[0]
    with torch.no_grad():
        logits -= 0.1 * gradient
    assert kl().item() < before


@pytest.mark.parametrize("moved", [False, True], ids=["on policy", "after an update"])
def test_the_importance_weighted_kl_has_the_gradient_of_the_true_kl(moved):
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([0.4, 0.35, 0.25], dtype=torch.float64).log() if moved else logits.detach().log_softmax(0)
    ref = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64).log()
    logp = logits.log_softmax(0)
    true = torch.autograd.grad((logp.exp() * (logp - ref)).sum(), logits, retain_graph=True)[0]
    objective = build("dapo", beta=1.0)
    mean = torch.zeros(())
    for v in range(3):  # the expectation over what the old policy samples
        batch = rows_of(1, ref=ref[v : v + 1, None], old=old[v : v + 1, None] if moved else None)
        mean = mean + old[v].exp() * objective(logp[v].reshape(1, 1), batch).loss
    assert torch.allclose(torch.autograd.grad(mean, logits)[0], true, rtol=1e-6, atol=1e-8)


def test_the_kl_is_weighted_by_the_ratio_of_the_same_level():
    """k3 of d = ln 2 at each token is 1 - ln 2; the ratios e^1, e^0 have the geometric mean e^.5."""
    logprobs, old = torch.zeros(1, 2), torch.tensor([[-1.0, 0.0]])
    batch = rows_of(2, old=old, ref=torch.full((1, 2), math.log(2)))
    for level, weights in [("token", (math.e, 1.0)), ("sequence", (math.exp(0.5),) * 2)]:
        objective = build("dapo", beta=1.0, importance_sampling_level=level)
        loss = loss_of(objective, logprobs, batch)[0]
        assert loss == pytest.approx((1 - math.log(2)) * sum(weights) / 2, rel=1e-6)


def test_beta_zero_needs_no_reference_and_logs_no_kl():
    assert "kl" not in build(beta=0.0)(torch.zeros(1, 2), rows_of(2)).stats
    with pytest.raises(ValueError, match=r"beta=0\.1 needs reference log-probs"):
        build(beta=0.1)(torch.zeros(1, 2), rows_of(2))


# --- the mask ---------------------------------------------------------------------------------------------------------


def unguarded(logprobs, old_logprobs, advantages, mask):
    """A policy loss of someone else's making: no cap stops a NaN on its way back."""
    ratio = (logprobs - old_logprobs).exp()
    return TokenLoss(-ratio * advantages[:, None], {"ratio": ratio.detach()})


@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf, 1e30])
@pytest.mark.parametrize("where", ["logprobs", "old_logprobs", "ref_logprobs"])
@pytest.mark.parametrize("own", [False, True], ids=["built in", "one's own"])
def test_nothing_outside_the_mask_reaches_the_loss_the_figures_or_the_gradient(where, junk, own):
    logprobs, batch = some_step()
    batch = replace(batch, mask=batch.mask & (torch.arange(8) != 1)[:, None])  # row 1 has tokens, and none is credited
    objective = build("grpo", beta=0.1)
    if own:
        objective = replace(objective, policy_loss=unguarded, kl=lambda logp, ref: (ref - logp).square() / 2)
    loss, gradient = loss_of(objective, logprobs, batch)
    figures = {name: (s.item(), n.item()) for name, (s, n) in objective(logprobs, batch).stats.items()}
    if where == "logprobs":
        logprobs = logprobs.masked_fill(~batch.mask, junk)
    else:
        batch = replace(batch, **{where: getattr(batch, where).masked_fill(~batch.mask, junk)})
    spoilt, same = loss_of(objective, logprobs, batch)
    assert spoilt == loss
    assert {name: (s.item(), n.item()) for name, (s, n) in objective(logprobs, batch).stats.items()} == figures
    assert torch.equal(same, gradient)


def test_figures_are_sums_and_counts_over_credited_tokens():
    # ratios 1.5 | 1.5 | .5 | .5 with A = +1, -1, +1, -1, and a pad that would be clipped in each row
    old = torch.zeros(4, 1)
    batch = rows_of(1, 1, 1, 1, advantages=[1.0, -1.0, 1.0, -1.0], pads=1, old=old)
    logprobs = torch.tensor([[1.5, 9.0], [1.5, 0.1], [0.5, 9.0], [0.5, 0.1]]).log()
    stats = {name: (s.item(), n.item()) for name, (s, n) in build()(logprobs, batch).stats.items()}
    assert stats == {"clip_ratio/high": (1.0, 4.0), "clip_ratio/low": (1.0, 4.0), "clip_ratio/region": (2.0, 4.0)}


def test_a_ratio_of_the_completion_has_one_figure_per_completion():
    # mean log-ratios .3 and -.3: clipped above with A = 1, below with A = -1; a row without a token does not count
    old = torch.zeros(3, 2)
    logprobs = torch.tensor([[0.1, 0.5], [-0.5, -0.1], [9.0, 9.0]])
    batch = rows_of(2, 2, 0, advantages=[1.0, -1.0, 1.0], old=old)
    objective = build("grpo", importance_sampling_level="sequence")
    stats = {name: (s.item(), n.item()) for name, (s, n) in objective(logprobs, batch).stats.items()}
    assert stats == {"clip_ratio/high": (1.0, 2.0), "clip_ratio/low": (1.0, 2.0), "clip_ratio/region": (2.0, 2.0)}
    # 1.2 and -0.8, each the mean of its row, over three rows
    assert loss_of(objective, logprobs, batch)[0] == pytest.approx((-1.2 + 0.8) / 3)


def test_masked_sum_leaves_padding_out():
    # entropies 1, 2 | 3, 4 and junk in the pads: 10 over 4
    values = torch.tensor([[1.0, 2.0, NAN], [3.0, 4.0, -5.0]])
    mask = torch.tensor([[True, True, False]] * 2)
    assert [v.item() for v in masked_sum(values, mask)] == [10.0, 4.0]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_batch_without_tokens_has_a_loss_of_zero_that_is_connected(loss_type):
    weight = torch.ones(1, requires_grad=True)
    batch = rows_of(0, 0, advantages=[1.0, -1.0], ref=torch.zeros(2, 0))
    out = build(loss_type, beta=0.1)(weight.expand(2, 1)[:, :0], batch)
    assert out.loss.item() == 0.0
    assert torch.autograd.grad(out.loss, weight)[0].item() == 0.0


def test_log_probs_of_another_shape_than_the_batch_are_refused():
    with pytest.raises(ValueError, match=r"logprobs \(2, 3\), mask \(2, 4\)"):
        build()(torch.zeros(2, 3), rows_of(2, 4))


# --- what multiplies the policy loss ----------------------------------------------------------------------------------


def test_a_share_of_tokens_by_entropy_carries_the_policy_loss_and_counts_as_before():
    # the upper half of the entropies 1, 4, 3, 2 is 4 and 3; the KL stays on all tokens, and so does the count
    batch = rows_of(4, advantages=[1.0], pads=1, ref=torch.zeros(1, 4))
    entropy = torch.tensor([[1.0, 4.0, 3.0, 2.0, 9.0]])
    out = build("dapo", top_entropy=0.5)(torch.zeros(1, 5), batch, entropy=entropy)
    assert out.loss.item() == pytest.approx(-2.0)
    assert [v.item() for v in out.bonus] == [7.0, 2.0]
    assert build("dapo", top_entropy=0.4).bonus_items(batch).item() == pytest.approx(1.6)  # that share, not the 2 kept
    objective = build("dapo", top_entropy=0.5, beta=1.0)
    logprobs = torch.full((1, 5), -math.log(2)).requires_grad_()
    (gradient,) = torch.autograd.grad(objective(logprobs, batch, entropy=entropy).loss, logprobs)
    k3, slope = 1 - math.log(2), 1 - math.log(2) - 1  # d = ln 2: e^d - d - 1, and with the ratio k3 + (1 - e^d)
    assert k3 > 0
    assert gradient[0].tolist() == pytest.approx([slope, slope - 1, slope - 1, slope, 0.0], rel=1e-5)


def test_entropies_of_other_processes_are_among_those_that_are_ranked():
    batch, entropy = rows_of(2, advantages=[1.0]), torch.tensor([[1.0, 2.0]])
    objective = build("dapo", top_entropy=0.5)
    others = torch.tensor([5.0, 6.0])
    loss = objective(torch.zeros(1, 2), batch, entropy=entropy, pool=lambda own: torch.cat([own, others])).loss
    assert loss.item() == 0.0
    assert objective(torch.zeros(1, 2), batch, entropy=entropy).loss.item() == -1.0


def test_bad_completions_that_the_policy_has_left_behind_are_dropped_and_count():
    # 0.9 nats per token less likely than when sampled: row 0 is good, row 1 bad; row 2 is bad and near
    logprobs, old = -torch.ones(3, 2), torch.tensor([[-0.1, -0.1], [-0.1, -0.1], [-0.9, -0.9]])
    batch = rows_of(2, 2, 2, advantages=[1.0, -1.0, -1.0], old=old)
    objective = build("dapo", off_policy_threshold=0.5)
    out = objective(logprobs, batch)
    assert [v.item() for v in out.stats["off_policy_masked"]] == [1.0, 3.0]
    assert out.loss.item() == pytest.approx(2 * (-math.exp(-0.9) + math.exp(-0.1)), rel=1e-5)
    assert objective.items(batch).item() == 6


def test_a_samplers_own_log_probs_correct_the_policy_loss_or_are_its_old_policy():
    # the trainer finds the tokens e^.5 and e^-.5 times as likely as the sampler; the third is unknown
    logprobs, sampled = -torch.ones(1, 3), torch.tensor([[-1.5, -0.5, NAN]])
    batch = replace(rows_of(3, advantages=[1.0]), sampling_logprobs=sampled)
    plain = build("dapo")(logprobs, batch)
    assert plain.loss.item() == -3.0
    assert [v.item() for v in plain.stats["sampling/sampling_logp_difference/mean"]] == [1.0, 2.0]
    out = build("dapo", correction="token_truncate", correction_clip_max=1.2)(logprobs, batch)
    assert out.loss.item() == pytest.approx(-(1.2 + math.exp(-0.5) + 1))
    total, count = (v.item() for v in out.stats["sampling/importance_sampling_ratio/mean"])
    assert total / count == pytest.approx((1.2 + math.exp(-0.5) + 1) / 3)
    # vespo's W is exp(.5 - .5 + 0) = 1 then; without the second token it is e^.5
    for tokens, weight in [(3, 1.0), (1, math.exp(0.5))]:
        part = replace(rows_of(tokens, advantages=[1.0]), sampling_logprobs=sampled[:, :tokens])
        phi = build("vespo", correction="token_truncate")(logprobs[:, :tokens], part).stats["vespo/phi_seq_mean"][0]
        assert phi.item() == pytest.approx(weight**2 * math.exp(3 * (1 - weight)), rel=1e-5)


# --- rows without a gradient ------------------------------------------------------------------------------------------


def without_silent_rows(objective, batch):
    return objective.weighted(batch).select(objective.live_rows(batch))


def silent_and_live():
    """Rows 0 and 2 have no advantage, row 3 has no token; rows 1 and 4 carry the gradient."""
    lengths = (3, 2, 4, 0, 1)
    within = torch.arange(4) < torch.tensor(lengths)[:, None]
    return RolloutBatch(
        prompt_ids=(torch.tensor([5]), torch.tensor([6, 7])),
        prompt_of_row=(0, 0, 1, 1, 1),
        lengths=lengths,
        completion_ids=torch.full((5, 4), 9) * within,
        mask=within,
        advantages=torch.tensor([0.0, 1.5, 0.0, 2.0, -1.0]),
    )


# w among all five rows: dapo 1 for each token; grpo 1/2 and 1/1; dr_grpo 1/8; bnpo 1/10 of the ten tokens
@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [
        *((name, [1, 1, 1]) for name in ("dapo", "cispo", "vespo", "luspo", "reinforce")),
        *((name, [1 / 2, 1 / 2, 1]) for name in ("grpo", "sapo", "gmpo")),
        ("dr_grpo", [1 / 8] * 3),
        ("bnpo", [1 / 10] * 3),
    ],
)
def test_rows_that_carry_a_gradient_keep_the_weights_that_they_have_among_all_rows(loss_type, weights):
    objective = build_objective(loss_type=loss_type, scale_rewards="group", max_completion_length=8)
    whole = silent_and_live()
    live = without_silent_rows(objective, whole)
    assert live.lengths == (2, 1) and live.advantages.tolist() == [1.5, -1.0]
    assert live.token_weights[live.mask].tolist() == pytest.approx(weights)
    logprobs = torch.zeros(5, 4, requires_grad=True)
    (expected,) = torch.autograd.grad(objective(logprobs, whole).loss, logprobs)
    logprobs = torch.zeros(2, 2, requires_grad=True)
    (got,) = torch.autograd.grad(objective(logprobs, live).loss, logprobs)
    assert torch.allclose(got, expected[[1, 4], :2])
    assert not expected[[0, 2, 3]].any()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_figures_of_the_rows_that_are_left_out_need_no_forward_pass(loss_type, level):
    if level == "sequence" and "importance_sampling_level" not in knobs_of(loss_type):
        return
    objective, whole = build(loss_type, importance_sampling_level=level), silent_and_live()
    logprobs = -torch.rand(5, 4)
    expected = objective(logprobs, whole).stats
    live = objective(logprobs[[1, 4], :2], without_silent_rows(objective, whole)).stats
    silent = objective.silent_stats(whole, [1, 4])
    assert expected.keys() == live.keys() == silent.keys()
    for name, (total, count) in expected.items():
        assert total.item() == pytest.approx(live[name][0].item() + silent[name][0].item())
        assert count.item() == live[name][1].item() + silent[name][1].item()


def test_every_row_is_needed_where_there_is_a_kl_term():
    objective = build_objective(loss_type="dapo", scale_rewards="group", max_completion_length=8, beta=0.1)
    batch = silent_and_live()
    assert objective.live_rows(batch) == [0, 1, 2, 3, 4]


def test_rows_without_an_advantage_are_computed_where_their_entropy_matters():
    batch = silent_and_live()
    for knobs in ({"top_entropy": 0.5}, {"keeps_silent_rows": True}, {"off_policy_threshold": 0.5}):
        assert build("dapo", **knobs).live_rows(batch) == [0, 1, 2, 3, 4]


def test_one_row_is_left_where_none_carries_a_gradient():
    objective = build_objective(loss_type="dapo", scale_rewards="group", max_completion_length=8)
    batch = replace(silent_and_live(), advantages=torch.zeros(5))
    assert without_silent_rows(objective, batch).lengths == (0,)
