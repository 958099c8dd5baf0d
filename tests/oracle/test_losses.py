"""Each policy loss under each aggregation against the loops of ``reference``: value and gradient."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.losses import POLICY_LOSSES
from tests.oracle import reference

LENGTH = 7
LEVELS = ("token", "sequence", "sequence_token")

# Log-probs are whole multiples of a power of two, so that differences and ties in log space are exact on both sides.
# The extreme ones lie beyond the cut at +-20, the small ones within the clip of a completion's ratio.
small = st.integers(-100, 100)
extreme = st.sampled_from([0, 0, 0, 20, -20, 21, -21, 25, -25, 1000, -1000, 10**6, -(10**6)])


@st.composite
def completions(draw, most=4):
    """Completions with ties, holes in the mask, no credited token at all, extreme ratios; ``old`` may be absent."""
    width, absent = draw(st.integers(1, 5)), draw(st.integers(0, 4)) == 0
    grid = draw(st.sampled_from([1 / 64, 1 / 2**16]))
    rows = []
    for _ in range(draw(st.integers(1, most))):
        old = [-draw(st.integers(0, 300)) / 64 for _ in range(width)]
        moves = [draw(st.one_of(small.map(lambda k: k * grid), extreme.map(float))) for _ in range(width)]
        rows.append(
            {
                "logp": [o + m for o, m in zip(old, moves, strict=True)],
                "old": None if absent else old,
                "mask": draw(st.lists(st.booleans(), min_size=width, max_size=width)),
                "A": draw(st.sampled_from([0.0, 1.0, -1.0, 0.37, -2.5, 1e-3])),
            }
        )
    return rows


maybe = functools.partial(st.sampled_from)
# A loss without a line here, and one that the reference lacks, fails: its function there takes its knobs by name.
KNOBS = {
    "clipped": {
        "epsilon": maybe([0.0, 0.2]),
        "epsilon_high": maybe([None, 0.0, 0.28]),
        "delta": maybe([None, 2.0, 4.0]),
        "importance_sampling_level": maybe(LEVELS),
    },
    "clipped_sequence": {
        "epsilon": maybe([3e-4, 0.0, 0.2]),
        "epsilon_high": maybe([4e-4, None, 0.3]),
        "delta": maybe([None, 2.0]),
    },
    "clipped_sequence_token": {
        "epsilon": maybe([3e-4, 0.0, 0.2]),
        "epsilon_high": maybe([4e-4, None, 0.3]),
        "delta": maybe([None, 2.0]),
    },
    "sapo": {
        "sapo_temperature_pos": maybe([1.0, 0.5]),
        "sapo_temperature_neg": maybe([1.05, 3.0]),
        "importance_sampling_level": maybe(LEVELS),
    },
    "gmpo": {"gmpo_epsilon": maybe([0.4, 0.5, 0.0]), "gmpo_epsilon_high": maybe([None, 0.25, 0.0])},
    "cispo": {"epsilon_high": maybe([5.0, 1.0, 1.28]), "importance_sampling_level": maybe(LEVELS)},
    "vespo": {
        "vespo_k_pos": maybe([2.0, 1.0]),
        "vespo_lambda_pos": maybe([3.0, 0.5]),
        "vespo_k_neg": maybe([3.0, 0.5]),
        "vespo_lambda_neg": maybe([2.0, 4.0]),
    },
    "reinforce": {"importance_weighted": maybe([True, False])},
}


def dumb(name: str, knobs: dict):
    """The reference's function with the package's knobs."""
    k = dict(knobs)
    if "importance_sampling_level" in k:
        k["level"] = k.pop("importance_sampling_level")
    if name.startswith("clipped_sequence"):
        return functools.partial(reference.clipped, level=name.removeprefix("clipped_"), **k)
    renamed = {
        "sapo": {"sapo_temperature_pos": "pos", "sapo_temperature_neg": "neg"},
        "gmpo": {"gmpo_epsilon": "epsilon", "gmpo_epsilon_high": "epsilon_high"},
        "cispo": {"epsilon_high": "cap"},
        "vespo": {f"vespo_{n}": n for n in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
        "reinforce": {"importance_weighted": "weighted"},
    }.get(name, {})
    return functools.partial(getattr(reference, name), **{renamed.get(n, n): v for n, v in k.items()})


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ours(name, knobs, aggregation, rows):
    """Value and gradient of the package's objective, sum(w * loss) / Z."""
    logprobs = double([row["logp"] for row in rows]).requires_grad_()
    old = None if rows[0]["old"] is None else double([row["old"] for row in rows])
    mask = torch.tensor([row["mask"] for row in rows])
    token = POLICY_LOSSES[name](logprobs, old, double([row["A"] for row in rows]), mask, **knobs)
    assert token.loss.shape == mask.shape
    length = {"length": LENGTH} if aggregation == "fixed_length" else {}
    weights, items = AGGREGATIONS[aggregation](mask.double(), **length)
    value = torch.where(mask, token.loss * weights, 0.0).sum() / items.clamp(min=1)
    return value.item(), torch.autograd.grad(value, logprobs)[0].tolist()


def worst(name, knobs, aggregation, rows) -> float:
    """The largest error of value and gradient as a multiple of what is allowed, 1e-9 relative.

    A sum is measured against the size of its terms, since rows cancel. A slope that has all but vanished, as in the
    tails of a sigmoid, is measured against the slope of a free token.
    """
    token_weights = reference.weights(aggregation, rows, LENGTH)
    value, size, gradient = reference.objective(rows, dumb(name, knobs), token_weights)
    got, slopes = ours(name, knobs, aggregation, rows)
    errors = [abs(got - value) / (1e-9 * size + 1e-300)]
    for i, row in enumerate(rows):
        free = abs(row["A"]) * max(token_weights[i])
        for t, expected in enumerate(gradient[i]):
            errors.append(abs(slopes[i][t] - expected) / (1e-9 * abs(expected) + 1e-13 * free + 1e-300))
    return max(errors)


def test_every_loss_has_its_oracle():
    assert set(KNOBS) == set(POLICY_LOSSES)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(data=st.data(), rows=completions())
def test_value_and_gradient_are_those_of_the_loops(name, data, rows):
    knobs = {knob: data.draw(values, label=knob) for knob, values in KNOBS[name].items()}
    aggregation = data.draw(st.sampled_from(list(AGGREGATIONS)), label="aggregation")
    assert worst(name, knobs, aggregation, rows) <= 1


@pytest.mark.parametrize("name", POLICY_LOSSES)
@settings(max_examples=30)
@given(rows=completions(), aggregation=st.sampled_from(list(AGGREGATIONS)))
def test_the_defaults_too(name, rows, aggregation):
    defaults = dict(POLICY_LOSSES[name].__kwdefaults__ or {})
    assert worst(name, defaults, aggregation, rows) <= 1


# --- on paper ---------------------------------------------------------------------------------------------------------

E = math.e
WIDE = {"epsilon": 0.2, "epsilon_high": 0.2}


@pytest.mark.parametrize(
    ("name", "knobs", "log_ratios", "advantage", "losses", "slopes"),
    [
        # d = (.1, .2, .6): s = exp(.3) = 1.349859 is above 1.2, so with A = 1 all is 1.2 and nothing moves
        ("clipped_sequence", WIDE, (0.1, 0.2, 0.6), 1, [-1.2] * 3, [0] * 3),
        # with A = -1 the ratio is free: loss s, and each of the three equal losses moves each token by s / 3
        ("clipped_sequence", WIDE, (0.1, 0.2, 0.6), -1, [1.349859] * 3, [1.349859] * 3),
        # GSPO-token: the same value; each token moves its own loss alone, by s
        ("clipped_sequence_token", WIDE, (0.1, 0.2, 0.6), -1, [1.349859] * 3, [1.349859] * 3),
        # the paper's clip: exp(.0003) = 1.00030005 is within 1 + 4e-4, exp(.0005) is not
        ("clipped_sequence", {}, (0.0003,), 1, [-1.00030005], [-1.00030005]),
        ("clipped_sequence", {}, (0.0005,), 1, [-1.0004], [0]),
        # ratios e, 1, 1/e; tau = 1: p = sigmoid(1.718282) = .847907, .5, sigmoid(-.632121) = .347030; loss -4 p;
        # slope -4 p (1 - p) r = -4 * .128960 * 2.718282, -1, -4 * .226600 * .367879
        ("sapo", {}, (1.0, 0.0, -1.0), 1, [-3.391630, -2.0, -1.388119], [-1.402203, -1.0, -0.333446]),
        # A = -1, tau = 1.05, ratio 1: loss 4 / 1.05 / 2 = 1.904762, slope 1
        ("sapo", {}, (0.0,), -1, [1.904762], [1.0]),
        # d = (.1, .9): the second counts as .4; exp(.25) = 1.284025; each of two losses moves the first by half of it
        ("gmpo", {}, (0.1, 0.9), 1, [-1.284025] * 2, [-1.284025, 0]),
        # A = -1, d = (-.9, .3): -.9 counts as -.4, .3 is free; exp(-.05) = .951229
        ("gmpo", {}, (-0.9, 0.3), -1, [0.951229] * 2, [0, 0.951229]),
        # ratios 7.389 (weight 5) and .5 (no lower bound), log-probs 2 and -.693147 (old is 0): loss -w A logp
        ("cispo", {}, (2.0, math.log(0.5)), 1, [-10.0, 0.346574], [-5.0, -0.5]),
        # W = exp(.2 + .493147) = 2: phi = 2^2 exp(3 (1 - 2)) = 4 exp(-3) = .199148; loss -phi logp
        ("vespo", {}, (0.2, 0.49314718), 1, [-0.039830, -0.098209], [-0.199148] * 2),
        # A = -1: phi = 2^3 exp(2 (1 - 2)) = 8 exp(-2) = 1.082682
        ("vespo", {}, (0.2, 0.49314718), -1, [0.216536, 0.533922], [1.082682] * 2),
        # ratio e, never clipped: loss -e * 1, slope -e; without the weight: loss -1, slope -1
        ("reinforce", {}, (1.0,), 1, [-E], [-E]),
        ("reinforce", {"importance_weighted": False}, (1.0,), 1, [-1.0], [-1.0]),
    ],
)
def test_the_case_on_paper(name, knobs, log_ratios, advantage, losses, slopes):
    """Old log-probs 0, all tokens credited; slopes are those of the sum of the losses."""
    logprobs = double([log_ratios]).requires_grad_()
    mask = torch.ones(1, len(log_ratios), dtype=torch.bool)
    out = POLICY_LOSSES[name](logprobs, torch.zeros_like(logprobs), double([advantage]), mask, **knobs).loss
    assert out[0].tolist() == pytest.approx(losses, abs=2e-6)
    assert torch.autograd.grad(out.sum(), logprobs)[0][0].tolist() == pytest.approx(slopes, abs=2e-6)


def test_luspo_is_the_sequence_ratio_summed():
    # two completions, lengths 1 and 3, on policy, A = 1 and -1: J = 1/2 (1 * 1 - 3 * 1) = -1, so the loss is 1; each
    # token of either has slope -+1/2, where GSPO gives -1/2 and 1/6
    rows = [
        {"logp": [-1.0, 0.0, 0.0], "old": None, "mask": [True, False, False], "A": 1.0},
        {"logp": [-1.0, -2.0, -3.0], "old": None, "mask": [True, True, True], "A": -1.0},
    ]
    value, slopes = ours("clipped_sequence", {}, "sequence_sum", rows)
    assert value == pytest.approx(1.0, abs=1e-12)
    assert slopes[0] == pytest.approx([-0.5, 0, 0]) and slopes[1] == pytest.approx([0.5] * 3)
    value, slopes = ours("clipped_sequence", {}, "sequence_mean", rows)
    assert value == pytest.approx(0.0, abs=1e-12)
    assert slopes[0] == pytest.approx([-0.5, 0, 0]) and slopes[1] == pytest.approx([1 / 6] * 3)
