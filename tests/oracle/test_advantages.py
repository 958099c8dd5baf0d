"""Each advantage against the loops of ``reference``."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.functional.advantages import ADVANTAGES, MULTI_REWARD_ADVANTAGES, normalize_then_sum
from tests.oracle import reference

NAN = math.nan
rewards = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.1, 1 / 3, 1e6 + 0.1, NAN]), st.integers(-1000, 1000).map(lambda k: k / 64)
)


@st.composite
def batches(draw, functions=0):
    """Groups of unequal size, padded with NaN; ties and constant groups are common."""
    size = draw(st.integers(1, 6))
    cell = st.lists(rewards, min_size=functions, max_size=functions) if functions else rewards
    gap = [NAN] * functions if functions else NAN
    groups = []
    for _ in range(draw(st.integers(1, 4))):
        group = draw(st.lists(cell, min_size=1, max_size=size))
        if draw(st.booleans()):
            group = [group[0]] * len(group)
        groups.append(group + [gap] * (size - len(group)))
    return groups


def agrees(got, expected):
    for row, wanted in zip(got, expected, strict=True):
        # What lies between two rewards near 1e6 is known to 1e-10 only; what is far from 0 is exact to 1e-9.
        assert row == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def double(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("name", ADVANTAGES)
@given(groups=batches(), ddof=st.sampled_from([0, 1]), eps=st.sampled_from([1e-4, 1e-8]))
def test_every_advantage_is_that_of_the_loops(name, groups, ddof, eps):
    knobs = {"ddof": ddof, "eps": eps} if ADVANTAGES[name].__kwdefaults__ else {}
    spread = [v for group in groups for v in group if v == v]
    if knobs and spread and 0 < max(spread) - min(spread) < 1e-3:
        return  # rewards that differ in rounding alone, over a deviation of the same size: nothing is known of them
    agrees(ADVANTAGES[name](double(groups), **knobs).tolist(), reference.advantage(name, groups, **knobs))


@given(
    groups=st.integers(1, 3).flatmap(lambda r: batches(functions=r)),
    data=st.data(),
    ddof=st.sampled_from([0, 1]),
)
def test_normalize_then_sum_is_that_of_the_loops(groups, data, ddof):
    functions = len(groups[0][0])
    weights = data.draw(st.lists(st.sampled_from([1.0, 0.5, -2.0, 0.0]), min_size=functions, max_size=functions))
    got = normalize_then_sum(double(groups), weights=weights, ddof=ddof)
    agrees(got.tolist(), reference.normalize_then_sum(groups, weights, ddof=ddof))


def test_the_table_of_several_rewards():
    assert set(MULTI_REWARD_ADVANTAGES) == {"normalize_then_sum"}


# --- on paper ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "groups", "expected"),
    [
        # {1, 0, 0, 0}: the others' means are 0 and 1/3; two scorable members: the other one alone
        ("leave_one_out", [[1, 0, 0, 0]], [[1, -1 / 3, -1 / 3, -1 / 3]]),
        ("leave_one_out", [[1, NAN, 4, NAN]], [[-3, 0, 3, 0]]),
        # {1, 3} and {5, 7}: mean 4, squares 9 + 1 + 1 + 9 = 20, sqrt(20 / 3) = 2.581989; 3 / 2.582089, 1 / 2.582089
        ("global_zscore", [[1, 3], [5, 7]], [[-1.161850, -0.387283], [0.387283, 1.161850]]),
        # centred: -1, 1, -1, 1; squares 4; sqrt(4 / 3) = 1.154701; 1 / 1.154801. The batch's own deviation, as in
        # batch_zscore, would give 1 / 2.582089 = .387283
        ("group_center_global_std", [[1, 3], [5, 7]], [[-0.865950, 0.865950]] * 2),
        ("batch_zscore", [[1, 3], [5, 7]], [[-0.387283, 0.387283]] * 2),
        # {0, 1} and {5, -}: centred -.5, .5, 0; the mean of the three is 0; squares .5; sqrt(.5 / 2) = .5
        ("group_center_global_std", [[0, 1], [5, NAN]], [[-0.999800, 0.999800], [0, 0]]),
    ],
)
def test_the_case_on_paper(name, groups, expected):
    for row, wanted in zip(ADVANTAGES[name](double(groups)).tolist(), expected, strict=True):
        assert row == pytest.approx(wanted, abs=1e-6)


def test_several_rewards_on_paper():
    # GDPO's own example: two binary rewards; sums (0, 1) and (0, 2). Each reward that differs gives -+.707107, so the
    # sums are -+.707107 and -+1.414214 (less eps); deviation of the four: sqrt((2 * .5 + 2 * 2) / 3) = 1.290994.
    # .707107 / 1.290994 = .547723, twice that for the second. Added up first, both groups would have -+.7071.
    two = [[[0, 0], [0, 1]], [[0, 0], [1, 1]]]
    got = normalize_then_sum(double(two), eps=0.0)
    assert got.flatten().tolist() == pytest.approx([-0.547723, 0.547723, -1.095445, 1.095445], abs=1e-6)
    # rewards [0, 1] and [0, 10] of one group: normalised first -1.41411, added up first -.70710
    one = double([[[0, 0], [1, 10]]])
    deviation = math.sqrt(2) * 1.41411
    assert normalize_then_sum(one)[0].tolist() == pytest.approx([-1.41411 / deviation, 1.41411 / deviation], abs=1e-4)
    # weights 1 and 2 of (0, 1) and (1, 0): -.7071 + 2 * .7071 = .7071; a third reward that never applies adds nothing
    crossed = double([[[0, 1, NAN], [1, 0, NAN]]])
    got = normalize_then_sum(crossed, weights=[1.0, 2.0, 5.0], eps=0.0)
    assert got[0].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)])
