from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.correction import CORRECTIONS, mismatch_stats, token_mask, token_truncate

NAN = math.nan
each = pytest.mark.parametrize("name", CORRECTIONS)


def weights(name, d, mask=None, **bounds):
    """Weights of one completion whose tokens are likelier to the trainer by ``d`` nats."""
    d = torch.tensor([d], dtype=torch.float64)
    mask = torch.ones_like(d) if mask is None else torch.tensor([mask])
    return CORRECTIONS[name](d, torch.zeros_like(d), mask, **bounds)[0].tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    # d = .1, .2, .9: e^d = 1.105171, 1.221403, 2.459603; e^1.2 = 3.320117 is above 3; e^.4 = 1.491825
    [
        ("token_truncate", [1.105171, 1.221403, 2.459603]),
        ("token_mask", [1.105171, 1.221403, 2.459603]),
        ("sequence_truncate", [3.0]),
        ("sequence_mask", [0.0]),
        ("geometric_truncate", [1.491825]),
        ("geometric_mask", [1.491825]),
    ],
)
def test_the_case_on_paper(name, expected):
    assert weights(name, [0.1, 0.2, 0.9]) == pytest.approx(expected, abs=1e-6)


def test_every_correction_has_its_case_on_paper():
    levels, kinds = ("token", "sequence", "geometric"), ("truncate", "mask")
    assert set(CORRECTIONS) == {f"{level}_{kind}" for level in levels for kind in kinds}


def test_the_weight_of_a_sequence_is_the_exponential_of_a_sum():
    # exp(.6) = 1.82212 and not the sum of three exponentials, 3.67643; the third token hidden: exp(.3)
    assert weights("sequence_truncate", [0.1, 0.2, 0.3]) == pytest.approx([1.82212], abs=1e-5)
    assert weights("sequence_truncate", [0.1, 0.2, 0.3], mask=[1, 1, 0]) == pytest.approx([1.34986], abs=1e-5)


def test_truncating_holds_at_a_bound_and_masking_drops_beyond_it():
    d = [math.log(r) for r in (0.25, 0.5, 1.0, 2.0, 4.0)]
    bounds = {"clip_min": 0.4, "clip_max": 2.5}
    assert weights("token_truncate", d, **bounds) == pytest.approx([0.4, 0.5, 1.0, 2.0, 2.5])
    assert weights("token_mask", d, **bounds) == pytest.approx([0.0, 0.5, 1.0, 2.0, 0.0])


def test_a_bound_itself_is_within():
    assert weights("token_mask", [0.0], clip_min=1.0, clip_max=1.5) == [1.0]
    assert weights("token_mask", [0.0], clip_min=0.5, clip_max=1.0) == [1.0]


@each
def test_either_bound_may_be_missing(name):
    above, below = [3.0, 3.0], [-3.0, -3.0]
    assert max(weights(name, above, clip_max=None)) == pytest.approx(math.exp(6 if "sequence" in name else 3))
    assert min(weights(name, below, clip_min=None)) > 0
    with pytest.raises(ValueError, match=r"clip_min=3.0 must be below clip_max=3.0"):
        weights(name, above, clip_min=3.0)


@each
def test_an_unknown_log_prob_corrects_nothing(name):
    now, sampler = torch.tensor([[-0.5, -0.5]]), torch.tensor([[NAN, -0.5]])
    assert torch.equal(CORRECTIONS[name](now, sampler, torch.ones(1, 2)), CORRECTIONS[name](now, now, torch.ones(1, 2)))


@each
def test_where_sampler_and_trainer_agree_the_weight_is_one(name):
    logprobs = torch.rand(2, 3).log()
    assert (CORRECTIONS[name](logprobs, logprobs, torch.ones(2, 3)) == 1).all()


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("d", [-1000.0, 1000.0])
def test_no_mismatch_overflows(name, dtype, d):
    now = torch.full((1, 3), d, dtype=dtype)
    got = CORRECTIONS[name](now, torch.zeros_like(now), torch.ones(1, 3), clip_max=None)
    assert got.isfinite().all() and got.dtype == torch.float32


@each
def test_the_weights_are_constants(name):
    now = torch.full((1, 2), 0.1, requires_grad=True)
    assert not CORRECTIONS[name](now, torch.zeros(1, 2), torch.ones(1, 2)).requires_grad


@each
def test_shapes_that_differ_are_refused(name):
    with pytest.raises(ValueError, match=r"sampling_logprobs \(1, 3\)"):
        CORRECTIONS[name](torch.zeros(1, 2), torch.zeros(1, 3), torch.ones(1, 2))


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_figures_of_tokens():
    # |d| = .5, 1 and (unknown) nothing; the fourth is hidden. Weights e^.5 = 1.64872, e^-1 = .36788, 1
    now, sampler = torch.tensor([[0.5, -1.0, 0.3, 9.0]]), torch.tensor([[0.0, 0.0, NAN, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0]])
    got = mismatch_stats(now, sampler, mask, token_truncate(now, sampler, mask))
    assert (got.difference_sum.item(), got.difference_count.item(), got.difference_max.item()) == (1.5, 2, 1.0)
    assert (got.ratio_sum.item(), got.ratio_count.item()) == (pytest.approx(3.01660, abs=1e-5), 3)
    assert (got.ratio_min.item(), got.ratio_max.item()) == pytest.approx((0.36788, 1.64872), abs=1e-5)


def test_the_figures_of_completions_count_each_once():
    now = torch.tensor([[0.1, 0.1], [0.5, 0.0], [9.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 0], [0, 0]])  # the last has no credited token and is no one's figure
    got = mismatch_stats(now, torch.zeros(3, 2), mask, CORRECTIONS["sequence_mask"](now, torch.zeros(3, 2), mask))
    assert (got.ratio_count.item(), got.difference_count.item()) == (2, 3)
    assert (got.ratio_min.item(), got.ratio_max.item()) == pytest.approx((math.exp(0.2), math.exp(0.5)))


def test_the_figures_of_nothing_change_no_sum_and_no_extreme():
    nothing = torch.zeros(1, 2)
    got = mismatch_stats(torch.ones(1, 2), torch.zeros(1, 2), nothing, token_mask(nothing, nothing, nothing))
    assert [v.item() for v in got] == [0.0, 0, 0.0, 0.0, 0, math.inf, -math.inf]
