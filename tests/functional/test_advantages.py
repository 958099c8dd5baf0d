from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.functional.advantages import (
    ADVANTAGES,
    batch_zscore,
    global_zscore,
    group_center,
    group_center_global_std,
    group_zscore,
    leave_one_out,
    normalize_then_sum,
)

NAN = math.nan
EVERY = pytest.mark.parametrize("advantage", ADVANTAGES.values(), ids=ADVANTAGES)
# All that know groups: global_zscore credits what lies between them.
BY_GROUP = {name: function for name, function in ADVANTAGES.items() if name != "global_zscore"}
GROUPED = pytest.mark.parametrize("advantage", BY_GROUP.values(), ids=BY_GROUP)

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
    return sum(map(Fraction, values), Fraction(0)) / max(len(values), 1)


def deviation(values, ddof: int) -> float:
    if len(values) <= ddof:
        return 0.0
    centre = mean(values)
    return math.sqrt(sum((Fraction(v) - centre) ** 2 for v in values) / (len(values) - ddof))


def on_paper(rows, name: str, ddof: int = 1, eps: float = 1e-4) -> list[list[float]]:
    """Exact fractions up to the square root; one number after the other."""
    everything = [v for row in rows for v in row if v == v]
    within = [Fraction(v) - mean([u for u in row if u == u]) for row in rows for v in row if v == v]
    out = []
    for row in rows:
        known = [v for v in row if v == v]
        centre = mean(everything if name == "global_zscore" else known)
        divisor = {
            "group_zscore": lambda known=known: deviation(known, ddof) + eps,
            "group_center": lambda: 1.0,
            "leave_one_out": lambda known=known: (len(known) - 1) / len(known) or 1.0,
            "batch_zscore": lambda: deviation(everything, ddof) + eps,
            "global_zscore": lambda: deviation(everything, ddof) + eps,
            "group_center_global_std": lambda: deviation(within, ddof) + eps,
        }[name]
        out.append([float(Fraction(v) - centre) / divisor() if v == v else 0.0 for v in row])
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


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("ddof", [0, 1])
@given(rows=groups)
def test_every_advantage_is_its_formula(name, ddof, rows):
    knobs = {"ddof": ddof} if ADVANTAGES[name].__kwdefaults__ else {}
    got = ADVANTAGES[name](double(rows), **knobs).tolist()
    for row, expected in zip(got, on_paper(rows, name, ddof), strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


def test_the_others_in_the_group_are_the_baseline():
    # {1, 0, 0, 0}: 1 - 0, and 0 - 1/3 three times; the mean of all, 1/4, would give .75 and -.25
    assert leave_one_out(double([[1, 0, 0, 0]]))[0].tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    # of two it is the other one; an unscorable member is no one's baseline
    assert leave_one_out(double([[3, NAN, 5]]))[0].tolist() == [-2.0, 0.0, 2.0]


def test_what_lies_between_groups_is_in_the_deviation_of_the_batch_alone():
    # centred -1, 1, -1, 1 with deviation 1.15470; the rewards have 57.74 - the second group's height, not its spread
    far = double([[0, 2], [100, 102]])
    assert group_center_global_std(far)[0].tolist() == pytest.approx([-0.86595, 0.86595], abs=1e-5)
    assert batch_zscore(far)[0].tolist() == pytest.approx([-0.01731, 0.01731], abs=1e-5)


def test_without_groups_an_easy_prompt_is_pushed_up_as_a_whole():
    # 1, 1, 0, 0: mean .5, deviation sqrt(4 * .25 / 3) = .57735; .5 / .57745. By group there is nothing to learn.
    got = global_zscore(double([[1, 1], [0, 0]])).flatten().tolist()
    assert got == pytest.approx([0.86587, 0.86587, -0.86587, -0.86587], abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, -7.0])
def test_without_groups_a_constant_batch_is_exactly_zero(constant, dtype):
    rewards = torch.full((3, 5), constant, dtype=dtype)
    rewards[1, 2] = NAN
    assert torch.equal(global_zscore(rewards), torch.zeros_like(rewards))


# --- constant groups and unscorable completions -----------------------------------------------------------------------


@GROUPED
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("constant", [0.0, 0.1, 1 / 3, 1e6 + 0.1, 1e-20, 1e30, -7.0])
def test_a_constant_group_has_advantages_of_exactly_zero(advantage, constant, dtype):
    if not torch.tensor(constant, dtype=dtype).isfinite():
        constant = 6e4  # 1e30 and 1e6 are infinite in float16; its largest number is 65504
    for size in range(2, 65):
        rewards = torch.full((2, size), constant, dtype=dtype)
        rewards[1] = 0.3  # a second constant: what lies between groups is nobody's credit
        assert torch.equal(advantage(rewards), torch.zeros_like(rewards))


@GROUPED
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


@GROUPED
@pytest.mark.parametrize("row", [[NAN, NAN, NAN], [NAN, 5.0, NAN], [2.0, NAN, 2.0]])
def test_a_group_without_spread_among_its_scorable_members_is_zero(advantage, row):
    assert advantage(double([row])).tolist() == [[0.0, 0.0, 0.0]]
    assert advantage(double([row, [0.0, 1.0, 2.0]]))[0].tolist() == [0.0, 0.0, 0.0]


@GROUPED
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
    unscaled = (group_center, leave_one_out)
    for advantage in unscaled:
        assert torch.equal(advantage(rewards * factor), advantage(rewards) * factor)
    for advantage in {*ADVANTAGES.values()} - {*unscaled}:
        assert torch.allclose(advantage(rewards * factor, eps=1e-4 * factor), advantage(rewards), atol=1e-12)


@EVERY
@given(rows=full_groups, data=st.data())
def test_the_order_of_members_and_of_groups_does_not_matter(advantage, rows, data):
    rewards = double(rows)
    members = data.draw(st.permutations(range(rewards.shape[1])))
    places = data.draw(st.permutations(range(rewards.shape[0])))
    moved = advantage(rewards[places][:, members])
    assert torch.allclose(moved, advantage(rewards)[places][:, members], atol=1e-9)


@EVERY
@given(rows=groups)
def test_every_group_twice_changes_nothing(advantage, rows):
    """Over a batch that is so of the population's deviation; the sample's knows how many there are."""
    knobs = {"ddof": 0} if "ddof" in (advantage.__kwdefaults__ or {}) else {}
    once, twice = advantage(double(rows), **knobs), advantage(double(rows + rows), **knobs)
    assert torch.allclose(twice, torch.cat([once, once]), rtol=1e-9, atol=1e-7)


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
    got = advantage(torch.tensor([[0, 1]]))  # int64; all of them are between .1 and 1 here
    assert got.is_floating_point()
    assert got[0, 1] > 0.1


@EVERY
@pytest.mark.parametrize("shape", [(4,), (2, 2, 1), ()])
def test_rewards_that_are_not_groups_are_refused(advantage, shape):
    with pytest.raises(ValueError, match=r"\(P, G\)"):
        advantage(torch.zeros(shape))


@EVERY
def test_no_eps_is_no_nan(advantage):
    knobs = {"eps": 0.0} if advantage.__kwdefaults__ else {}
    got = advantage(double([[1, 1], [1, 1]]), **knobs)
    assert torch.equal(got, torch.zeros(2, 2, dtype=torch.float64))


# --- several rewards --------------------------------------------------------------------------------------------------


def test_each_reward_is_normalised_before_they_are_added():
    # one group, rewards [0, 1] and [0, 10]: first normalised -.70701 - .70710 = -1.41411, first added -.70710. The last
    # step divides all by the batch's deviation, so that a second group is needed to see it
    plain = double([[[0, 0], [1, 10]], [[0, 0], [0, 10]]])  # the second group agrees in the first reward
    got = normalize_then_sum(plain)
    ratio = (got[0, 1] / got[1, 1]).item()
    assert ratio == pytest.approx(1.41411 / 0.70710, rel=1e-5)
    # added up first, each group has one spread and the ratio is 1
    added = group_zscore(plain.sum(dim=-1))
    assert (added[0, 1] / added[1, 1]).item() == pytest.approx(1.0, rel=1e-4)


def test_a_reward_that_does_not_apply_adds_nothing():
    rewards = double([[[1, NAN], [0, NAN], [NAN, NAN]]])
    got = normalize_then_sum(rewards)[0].tolist()
    # z-scores of {1, 0}: +-.70701; their deviation .99986, so +-.70704
    assert got == pytest.approx([0.70704, -0.70704, 0.0], abs=1e-4)
    assert got[2] == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_group_where_every_reward_is_constant_is_exactly_zero(dtype):
    rewards = torch.tensor(
        [[[0.1, 1 / 3]] * 5, [[0.0, 1.0], [1.0, 0.0], [0.3, 0.1], [2.0, 2.0], [0.1, 0.7]]], dtype=dtype
    )
    got = normalize_then_sum(rewards)
    assert torch.equal(got[0], torch.zeros(5, dtype=dtype))
    assert got[1].any() and got.dtype == dtype


@pytest.mark.parametrize("seed", range(5))
def test_of_several_rewards_neither_level_nor_scale_nor_order_nor_number_matters(seed):
    rewards = torch.randn(3, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rewards[0, 1, 0] = rewards[2, 3, 1] = NAN
    expected = normalize_then_sum(rewards, ddof=0, eps=1e-12)
    moved = rewards * torch.tensor([1.0, 7.0]) + torch.tensor([0.0, -300.0])  # one function in another unit
    assert torch.allclose(normalize_then_sum(moved, ddof=0, eps=1e-12), expected, atol=1e-9)
    order = [3, 0, 4, 2, 1]
    mixed = normalize_then_sum(rewards.flip(0)[:, order], ddof=0, eps=1e-12)
    assert torch.allclose(mixed, expected.flip(0)[:, order], atol=1e-9)
    twice = normalize_then_sum(torch.cat([rewards, rewards]), ddof=0, eps=1e-12)
    assert torch.allclose(twice, torch.cat([expected, expected]), atol=1e-9)


def test_weights_weigh_the_normalised_rewards():
    rewards = double([[[0, 0], [1, 100], [3, 50]]])
    alone = group_zscore(rewards[..., 0])
    total = normalize_then_sum(rewards, weights=[2.0, 0.0])
    # the weight itself cancels in the last division; the ratios are those of the one reward that counts
    assert (total / total[0, 0]).tolist()[0] == pytest.approx((alone / alone[0, 0]).tolist()[0])
    with pytest.raises(ValueError, match="2 reward functions need 2 weights, got"):
        normalize_then_sum(rewards, weights=[1.0])
    with pytest.raises(ValueError, match=r"\(P, G, R\)"):
        normalize_then_sum(rewards[0])
