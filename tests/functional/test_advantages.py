from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.functional.advantages import ADVANTAGES, batch_zscore, group_center, group_zscore, is_constant

NAN = math.nan
EVERY = pytest.mark.parametrize("advantage", ADVANTAGES.values(), ids=ADVANTAGES)

numbers = st.floats(-1e3, 1e3, allow_nan=False).map(lambda x: round(x, 3))
groups = st.integers(2, 8).flatmap(
    lambda g: st.lists(st.lists(st.one_of(numbers, st.just(NAN)), min_size=g, max_size=g), min_size=1, max_size=4)
)
full_groups = st.integers(2, 8).flatmap(
    lambda g: st.lists(st.lists(numbers, min_size=g, max_size=g), min_size=1, max_size=4)
)


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def mean(values) -> Fraction:
    return sum(map(Fraction, values), Fraction(0)) / len(values)


def deviation(values, ddof: int) -> float:
    if len(values) <= ddof:
        return 0.0
    centre = mean(values)
    return math.sqrt(sum((Fraction(v) - centre) ** 2 for v in values) / (len(values) - ddof))


def on_paper(rows, scale: str, ddof: int = 1, eps: float = 1e-4) -> list[list[float]]:
    """Exact fractions up to the square root; one number after the other."""
    everything = [v for row in rows for v in row if v == v]
    out = []
    for row in rows:
        known = [v for v in row if v == v]
        divisor = {"group": lambda known=known: deviation(known, ddof) + eps, "none": lambda: 1.0}.get(
            scale, lambda: deviation(everything, ddof) + eps
        )()
        out.append([float(Fraction(v) - mean(known)) / divisor if v == v else 0.0 for v in row])
    return out


# --- worked examples --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ddof", "std", "far", "near"),
    # rewards 10, 8, 3, 1: mean 5.5, squares 20.25 + 6.25 + 6.25 + 20.25 = 53; sqrt(53/3) = 4.2032, sqrt(53/4) = 3.6401;
    # 4.5 and 2.5 over each of them. The figure 3.9 that a public write-up prints for the deviation is neither.
    [(1, 4.2032, 1.0706, 0.5948), (0, 3.6401, 1.2362, 0.6868)],
)
def test_the_worked_example_for_either_deviation(ddof, std, far, near):
    rewards = double([[10, 8, 3, 1]])
    assert math.sqrt(53 / (4 - ddof)) == pytest.approx(std, abs=5e-5)
    assert group_zscore(rewards, ddof=ddof)[0].tolist() == pytest.approx([far, near, -near, -far], abs=5e-5)


def test_the_three_scales_differ_and_each_divides_by_its_own_deviation():
    rewards = double([[0, 1], [0, 10]])
    # group: .5 / (.70711 + .0001), 5 / (7.07107 + .0001)
    assert group_zscore(rewards).flatten().tolist() == pytest.approx([-0.70701, 0.70701, -0.70710, 0.70710], abs=5e-6)
    # batch: squares about 2.75 are 7.5625 + 3.0625 + 7.5625 + 52.5625 = 70.75; sqrt(70.75 / 3) = 4.85627
    assert batch_zscore(rewards).flatten().tolist() == pytest.approx([-0.10296, 0.10296, -1.02958, 1.02958], abs=5e-6)
    assert group_center(rewards).flatten().tolist() == [-0.5, 0.5, -5.0, 5.0]


def test_a_group_is_a_row():
    # P1 = {1, 3}, P2 = {10, 30}: 1 / (1.41421 + .0001) and 10 / (14.14214 + .0001)
    got = group_zscore(double([[1, 3], [10, 30]]))
    assert got.flatten().tolist() == pytest.approx([-0.70706, 0.70706, -0.70710, 0.70710], abs=5e-6)


@EVERY
@pytest.mark.parametrize("ddof", [0, 1])
@given(rows=groups)
def test_every_advantage_is_its_formula(advantage, ddof, rows):
    scale = {group_zscore: "group", batch_zscore: "batch", group_center: "none"}[advantage]
    knobs = {} if advantage is group_center else {"ddof": ddof}
    got = advantage(double(rows), **knobs).tolist()
    for row, expected in zip(got, on_paper(rows, scale, ddof), strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


# --- constant groups and unscorable completions -----------------------------------------------------------------------


@EVERY
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, 1e6 + 0.1, 1e-20, 1e30, -7.0])
def test_a_constant_group_has_advantages_of_exactly_zero(advantage, constant, dtype):
    if not torch.tensor(constant, dtype=dtype).isfinite():
        constant = 6e4  # 1e30 and 1e6 are infinite in float16; its largest number is 65504
    for size in range(2, 65):
        rewards = torch.full((2, size), constant, dtype=dtype)
        rewards[1] = 0.3  # a second constant: what lies between groups is nobody's credit
        assert torch.equal(advantage(rewards), torch.zeros_like(rewards))


@EVERY
def test_a_constant_group_stays_at_zero_beside_one_that_varies(advantage):
    got = advantage(double([[0.1, 0.1, 0.1], [0.0, 1.0, 5.0]]))
    assert got[0].tolist() == [0.0, 0.0, 0.0]
    assert (got[1] != 0).all()


def test_unscorable_rewards_are_out_of_the_statistics():
    # of 1, 3, 2: mean 2, deviation 1, so 1 / 1.0001 = .99990
    got = group_zscore(double([[1, NAN, 3, 2]]))[0].tolist()
    assert got == pytest.approx([-0.99990, 0, 0.99990, 0], abs=5e-6)
    assert got[1] == 0.0


def test_a_smaller_group_keeps_its_own_mean():
    # {1, 3} and {5}: -1, +1 and 0; a mean over everything would give -2, 0, +2
    assert group_center(double([[1, 3], [5, NAN]])).tolist() == [[-1.0, 1.0], [0.0, 0.0]]


@EVERY
@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 5.0, NAN], [2.0, NAN, 2.0]])
def test_a_group_without_spread_among_its_scorable_members_is_zero(advantage, row):
    assert advantage(double([row])).tolist() == [[0.0, 0.0, 0.0]]
    assert advantage(double([row, [0.0, 1.0, 2.0]]))[0].tolist() == [0.0, 0.0, 0.0]


@EVERY
def test_a_group_of_one_is_zero_and_not_nan(advantage):
    assert advantage(double([[7.0], [-2.0]])).tolist() == [[0.0], [0.0]]


# --- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ddof", [0, 1])
@given(rows=full_groups)
def test_no_advantage_exceeds_the_bound_of_its_group_size(ddof, rows):
    size = len(rows[0])
    bound = (size - 1) / math.sqrt(size) if ddof else math.sqrt(size - 1)
    assert group_zscore(double(rows), ddof=ddof).abs().max() <= bound
    for dtype in (torch.float32, torch.bfloat16):  # rounding to a narrow type may at most reach the rounded bound
        narrow = group_zscore(torch.tensor(rows, dtype=dtype), ddof=ddof)
        assert narrow.dtype == dtype
        assert narrow.abs().max() <= torch.tensor(bound, dtype=dtype)


@pytest.mark.parametrize("magnitude", [1.0, 1e6, 1e13, 1e15])
def test_the_bound_holds_for_rewards_one_rounding_step_apart(magnitude):
    rewards = double([[magnitude, math.nextafter(magnitude, math.inf)]])
    got = group_zscore(rewards)
    assert got.abs().max() <= 1 / math.sqrt(2)  # (G - 1) / sqrt(G) for G = 2
    step = math.ulp(magnitude)
    # on paper: -+ (step / 2) / (step / sqrt(2) + eps)
    expected = step / 2 / (step / math.sqrt(2) + 1e-4)
    assert got[0].tolist() == pytest.approx([-expected, expected], rel=1e-6, abs=1e-5)


@EVERY
@given(rows=full_groups, shift=st.integers(-1000, 1000))
def test_a_shift_of_all_rewards_changes_nothing(advantage, rows, shift):
    assert torch.allclose(advantage(double(rows) + shift), advantage(double(rows)), atol=1e-7)


@given(rows=full_groups, factor=st.sampled_from([0.5, 4.0, 1024.0]))
def test_the_scale_of_rewards_cancels_unless_scaling_is_off(rows, factor):
    # powers of two, so that the scaled rewards are exact; with eps scaled along, the quotient is the same number
    rewards = double(rows)
    assert torch.equal(group_center(rewards * factor), group_center(rewards) * factor)
    for scaled in (group_zscore, batch_zscore):
        assert torch.allclose(scaled(rewards * factor, eps=1e-4 * factor), scaled(rewards), atol=1e-12)


@EVERY
@given(rows=full_groups, data=st.data())
def test_the_order_of_members_and_of_groups_does_not_matter(advantage, rows, data):
    rewards = double(rows)
    members = data.draw(st.permutations(range(rewards.shape[1])))
    places = data.draw(st.permutations(range(rewards.shape[0])))
    moved = advantage(rewards[places][:, members])
    assert torch.allclose(moved, advantage(rewards)[places][:, members], atol=1e-9)


@EVERY
@given(rows=full_groups)
def test_within_a_group_more_reward_is_more_advantage(advantage, rows):
    for rewards, got in zip(rows, advantage(double(rows)).tolist(), strict=True):
        for i, j in [(i, j) for i in range(len(rewards)) for j in range(len(rewards))]:
            if rewards[i] == rewards[j]:
                assert got[i] == got[j]
            elif rewards[i] > rewards[j]:
                assert got[i] > got[j]


@EVERY
def test_the_better_of_two_bad_completions_is_encouraged(advantage):
    worse, better = advantage(double([[-3, -1]]))[0].tolist()
    assert worse < 0 < better


@EVERY
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_dtype_of_the_rewards_is_kept(advantage, dtype):
    assert advantage(torch.tensor([[0.0, 1.0]], dtype=dtype)).dtype == dtype


@EVERY
def test_whole_number_rewards_are_not_cut_to_whole_number_advantages(advantage):
    got = advantage(torch.tensor([[0, 1]]))  # int64; all three are between .1 and .8 here
    assert got.is_floating_point()
    assert got[0, 1] > 0.1


@EVERY
@pytest.mark.parametrize("shape", [(4,), (2, 2, 1), ()])
def test_rewards_that_are_not_groups_are_refused(advantage, shape):
    with pytest.raises(ValueError, match=r"\(P, G\)"):
        advantage(torch.zeros(shape))


def test_is_constant_tells_groups_without_signal():
    rewards = double([[1, 1, 1], [1, 1, 2], [NAN, 3, NAN], [NAN, NAN, NAN], [NAN, 3, 4]])
    assert is_constant(rewards).tolist() == [True, False, True, True, False]
    with pytest.raises(ValueError, match=r"\(P, G\)"):
        is_constant(torch.zeros(3))
