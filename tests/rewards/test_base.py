from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch

from grpo_trainer.rewards.base import RewardError, RewardInputs, RewardSet, check_rewards

NAN = math.nan


def inputs(count: int = 4, **columns) -> RewardInputs:
    """Completions "c0", "c1", …; each column holds one value per completion."""
    return RewardInputs(
        rows=[{"prompt": f"p{i}", **{name: values[i] for name, values in columns.items()}} for i in range(count)],
        completions=[f"c{i}" for i in range(count)],
        completion_ids=[(i, i + 1) for i in range(count)],
        trainer_state="the state",
    )


def gives(*values):
    def reward(completions, **kwargs):
        return list(values)

    return reward


def score(*functions, batch=None, **knobs):
    rewards, _ = RewardSet(functions, **knobs).score(batch or inputs())
    return rewards.tolist()


def same(got, expected) -> bool:
    return np.array_equal(np.array(got, dtype=float), np.array(expected, dtype=float), equal_nan=True)


# --- how a function is called -----------------------------------------------------------------------------------------


def test_a_function_gets_the_arguments_of_the_contract_by_name():
    got = {}

    def reward(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric, **rest):
        got.update(locals())
        return [0.0] * 3

    score(reward, batch=inputs(3, answer=[7, 8, 9], level=["a", "b", None]))
    assert got["prompts"] == ["p0", "p1", "p2"]
    assert got["completions"] == ["c0", "c1", "c2"]
    assert got["completion_ids"] == [[0, 1], [1, 2], [2, 3]]
    assert got["answer"] == [7, 8, 9]
    assert got["trainer_state"] == "the state"
    assert got["rest"] == {"level": ["a", "b", None]}
    assert callable(got["log_extra"]) and callable(got["log_metric"])


def test_a_column_never_takes_the_place_of_an_argument():
    taken = {"prompts": [1], "completions": [2], "completion_ids": [3], "trainer_state": [4], "log_metric": [5]}
    got = {}
    score(lambda **kwargs: got.update(kwargs) or [0.0], batch=inputs(1, **taken, completion=[6]))
    assert (got["prompts"], got["completions"], got["completion_ids"]) == (["p0"], ["c0"], [[0, 1]])
    assert got["trainer_state"] == "the state" and callable(got["log_metric"])
    assert "completion" not in got and "prompt" not in got


def test_a_column_that_a_row_lacks_is_none_there():
    batch = RewardInputs(rows=[{"prompt": "a"}, {"prompt": "b", "x": 1}], completions=["", ""], completion_ids=[[], []])
    assert score(lambda x, **kwargs: [0.0 if v is None else 1.0 for v in x], batch=batch) == [[0.0], [1.0]]


def test_what_one_function_does_to_its_lists_does_not_reach_the_next():
    def destructive(completions, completion_ids, answer, **kwargs):
        completions.clear(), answer.reverse(), completion_ids[0].clear()
        return [0.0] * 2

    def reader(completions, completion_ids, answer, **kwargs):
        assert (completions, completion_ids[0], answer) == (["c0", "c1"], [0, 1], [1, 2])
        return [1.0] * 2

    assert score(destructive, reader, batch=inputs(2, answer=[1, 2])) == [[0.0, 1.0]] * 2


def test_what_a_function_raises_comes_through_with_its_name():
    def broken(**kwargs):
        raise KeyError("nothing here")

    with pytest.raises(KeyError, match="nothing here") as caught:
        score(gives(1, 2, 3, 4), broken)
    assert caught.value.__notes__ == ["raised by reward function 'broken', while it scored 4 completions"]


def test_rows_are_completions_and_columns_are_functions():
    assert score(gives(1, 2, 3, 4), gives(10, 20, 30, 40)) == [[1, 10], [2, 20], [3, 30], [4, 40]]


def test_no_completions_are_no_rewards():
    rewards, _ = RewardSet([gives(), gives()]).score(inputs(0))
    assert rewards.shape == (0, 2)


# --- coroutines -------------------------------------------------------------------------------------------------------


async def in_async(completions, **kwargs):
    await asyncio.sleep(0)
    return [float(len(c)) for c in completions]


class AsyncObject:
    async def __call__(self, completions, **kwargs):
        return [5.0] * len(completions)


def test_coroutines_and_plain_functions_keep_their_places():
    got = score(in_async, gives(1, 2, 3, 4), AsyncObject(), functools.partial(in_async))
    assert got == [[2.0, i, 5.0, 2.0] for i in (1, 2, 3, 4)]


def test_coroutines_run_at_the_same_time():
    # Each waits for the other: one after the other, they would wait for ever.
    doors = [asyncio.Event(), asyncio.Event()]

    def meets(mine, other):
        async def reward(completions, **kwargs):
            doors[mine].set()
            await asyncio.wait_for(doors[other].wait(), timeout=10)
            return [float(mine)] * len(completions)

        return reward

    assert score(meets(0, 1), meets(1, 0)) == [[0.0, 1.0]] * 4


def test_coroutines_run_also_inside_a_running_event_loop():
    async def notebook_cell():
        return score(in_async, gives(1, 2, 3, 4)), threading.active_count()

    before = threading.active_count()
    got, after = asyncio.run(notebook_cell())
    assert got == [[2.0, i] for i in (1, 2, 3, 4)]
    assert after == before  # no thread is left behind


@pytest.mark.parametrize("running", [False, True])
def test_what_a_coroutine_raises_comes_through_with_its_name(running):
    async def broken(**kwargs):
        raise KeyError("nothing here")

    async def notebook_cell():
        return score(broken)

    with pytest.raises(KeyError, match="nothing here") as caught:
        asyncio.run(notebook_cell()) if running else score(broken)
    assert caught.value.__notes__ == ["raised by reward function 'broken', while it scored 4 completions"]


def test_an_interrupted_coroutine_does_not_go_on_behind_the_notebooks_back():
    ended = []

    async def slow(completions, **kwargs):
        try:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            ended.append("slow")

    async def notebook_cell():
        return score(slow)

    before = threading.active_count()
    loop = asyncio.new_event_loop()  # asyncio.run would turn the signal into a cancellation of its own
    with contextlib.closing(loop), pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(notebook_cell())
    assert ended == ["slow"]
    assert threading.active_count() == before


# --- what it may return -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "values",
    [
        [1, 0, 2.5, -3],
        (1, 0, 2.5, -3),
        np.array([1, 0, 2.5, -3]),
        np.array([1, 0, 2.5, -3], dtype=np.float32),
        torch.tensor([1, 0, 2.5, -3]),
        torch.tensor([1, 0, 2.5, -3], dtype=torch.bfloat16),
        [np.float32(1), np.int64(0), torch.tensor(2.5), torch.tensor([-3])],
        [True, False, Fraction(5, 2), np.array([-3.0])],
    ],
    ids=lambda v: type(v).__name__,
)
def test_numbers_of_any_library_are_rewards(values):
    got = check_rewards("f", values, ["a", "b", "c", "d"])
    assert got == [1.0, 0.0, 2.5, -3.0]
    assert all(type(v) is float for v in got)


@pytest.mark.parametrize("values", [[True, False], np.array([True, False]), torch.tensor([True, False])])
def test_true_is_one_and_false_is_zero(values):
    assert check_rewards("f", values, ["a", "b"]) == [1.0, 0.0]


@pytest.mark.parametrize("values", [[1, None], np.array([1, None], dtype=object)], ids=["list", "array"])
def test_none_says_that_the_reward_does_not_apply(values):
    assert same(check_rewards("f", values, ["a", "b"]), [1.0, NAN])


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (NAN, "nan, which is not finite"),
        (math.inf, "inf, which is not finite"),
        (-math.inf, "-inf, which is not finite"),
        (10**400, "inf, which is not finite"),
        (np.float64("nan"), "nan, which is not finite"),
        (torch.tensor(math.inf), "inf, which is not finite"),
        ("1", r"'1' \(str\), which is not a number"),
        (1j, r"1j \(complex\), which is not a number"),
        ({"score": 1}, r"\{'score': 1\} \(dict\), which is not a number"),
        ([1.0], r"\[1\.0\] \(list\), which is not a number"),
        (torch.tensor([1.0, 2.0]), r"\(Tensor\), which is not a number"),
        (np.array([1, 2]), r"\(ndarray\), which is not a number"),
        pytest.param(object(), r"\(object\), which is not a number", id="object"),
    ],
    ids=repr,
)
def test_what_is_no_finite_number_is_refused_with_function_row_and_value(value, said):
    with pytest.raises(RewardError, match=rf"'grade' returned .*{said}, for row 2: 'third'.*Return None where"):
        check_rewards("grade", [0.0, None, value], ["first", "second", "third"])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5])
def test_a_wrong_number_of_values_is_refused_with_both_numbers(count):
    def grade(**kwargs):
        return [1.0] * count

    with pytest.raises(RewardError, match=f"'grade' returned {count} values for 4 completions"):
        score(grade)


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        True,
        None,
        "1111",
        b"1111",
        {0: 1, 1: 1, 2: 1, 3: 1},
        {1, 2, 3, 4},
        torch.tensor(1.0),
        np.float64(1),
        map(float, "1111"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_list_is_refused_with_its_kind(value):
    def grade(**kwargs):
        return value

    with pytest.raises(RewardError, match=r"'grade' returned .* for 4 completions; it must return a list of 4 numbers"):
        score(grade)


def test_a_table_of_values_is_refused():
    with pytest.raises(RewardError, match=r"'f' returned .*not a number, for row 0"):
        check_rewards("f", np.ones((2, 1)), ["a", "b"])


def test_an_error_is_a_value_error_and_shows_a_long_completion_in_part():
    with pytest.raises(ValueError) as error:
        check_rewards("f", ["x"], ["y" * 10_000])
    assert len(str(error.value)) < 400
