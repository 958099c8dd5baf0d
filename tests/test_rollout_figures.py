"""What a rollout reports, and how several processes share one; the batch itself is in test_rollout.py."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.data import PromptRenderer
from grpo_trainer.functional.advantages import group_zscore, normalize_then_sum
from grpo_trainer.rewards.base import RewardSet
from grpo_trainer.rollout import RolloutCollector
from grpo_trainer.sampler import BatchPlan
from grpo_trainer.types import Completions, SamplingParams
from tests import helpers

END = helpers.EOS_ID


class Fake:
    """Completions of given lengths; one of length 5 is cut at the limit, any other ends by itself."""

    def __init__(self, lengths) -> None:
        self.lengths = lengths

    def generate(self, prompts, num_samples, sampling, *, seed, row_ids=None, observer=None):
        return Completions(
            ids=tuple((50,) * n if n == 5 else (50,) * (n - 1) + (END,) for n in self.lengths),
            finished=tuple(n != 5 for n in self.lengths),
        )


def gives(*values, name="score"):
    def reward(completions, **kwargs):
        return list(values)

    reward.__name__ = name
    return reward


@pytest.fixture
def collector(tiny_tokenizer):
    model = helpers.tiny_llama()

    def build(*functions, lengths=(5, 3, 2, 1), weights=None, group=2, **parts) -> RolloutCollector:
        return RolloutCollector(
            renderer=PromptRenderer(tiny_tokenizer),
            generator=Fake(lengths),
            sampling=SamplingParams(max_new_tokens=5, eos_token_ids=(END,), pad_token_id=END),
            rewards=RewardSet(functions or [gives(0, 1, 0, 0)], weights),
            advantage=group_zscore,
            num_generations=group,
            policy=lambda: model,
            **parts,
        )

    return build


def collect(built, num_samples=(2, 2)):
    return built.collect([{"prompt": "ab"}, {"prompt": "c"}], list(num_samples), seed=0)


def reduced(built) -> dict[str, float]:
    return built.metrics.reduce()


# --- figures ----------------------------------------------------------------------------------------------------------


def test_the_reward_that_is_logged_is_the_weighted_one_and_its_parts_are_not_weighted(collector):
    built = collector(gives(1, 1, 1, 1, name="a"), gives(0, 0, 2, 2, name="b"), weights=[0.7, 0.3])
    collect(built)
    got = reduced(built)
    # totals .7, .7, 1.3, 1.3: mean 1.0, squares 4 * .09 = .36, sqrt(.36 / 3) = .34641. Of b: mean 1, sqrt(4 / 3).
    assert got["reward"] == pytest.approx(1.0)
    assert got["reward_std"] == pytest.approx(0.34641, abs=1e-5)
    assert (got["rewards/a/mean"], got["rewards/a/std"]) == (1.0, 0.0)
    assert got["rewards/b/mean"] == 1.0 and got["rewards/b/std"] == pytest.approx(math.sqrt(4 / 3))
    assert got["frac_reward_zero_std"] == 1.0  # both groups are constant, whatever lies between them


def test_a_function_that_applies_to_some_is_averaged_over_those(collector):
    built = collector(gives(1, 1, 1, 1, name="a"), gives(4, None, 6, None, name="b"))
    collect(built)
    got = reduced(built)
    assert got["rewards/b/mean"] == 5.0 and got["rewards/b/std"] == pytest.approx(math.sqrt(2))
    assert got["reward"] == (5 + 1 + 7 + 1) / 4


def test_the_share_of_groups_without_signal(collector):
    for values, share in (((0, 1, 0, 0), 0.5), ((0, 1, 1, 0), 0.0), ((0.1, 0.1, 7, 7), 1.0), ((0, None, 1, 2), 0.5)):
        built = collector(gives(*values))
        collect(built)
        assert reduced(built)["frac_reward_zero_std"] == share


def test_rewards_that_are_normalised_first_are_told_apart_where_their_sum_is_constant(collector):
    """Of the first group each function varies and the sum does not; in the second nothing does."""
    a, b = gives(0, 1, 2, 2, name="a"), gives(1, 0, 2, 2, name="b")
    built = collector(a, b, weights=[2.0, 1.0], joint_advantage=normalize_then_sum)
    rollout = collect(built)
    assert reduced(built)["frac_reward_zero_std"] == 0.5
    # z-scores of a are -d, d and of b d, -d with d = sqrt(.5); the sums -d, d, 0, 0 have the deviation d sqrt(2 / 3)
    assert rollout.batch.advantages.tolist() == pytest.approx([-math.sqrt(1.5), math.sqrt(1.5), 0.0, 0.0], rel=1e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_lengths_are_those_drawn_whatever_is_masked(collector, masked):
    built = collector(lengths=(5, 3, 5, 3), mask_truncated=masked)
    collect(built)
    got = {name.removeprefix("completions/"): v for name, v in reduced(built).items() if "completions/" in name}
    # rows of 5 (cut) and 3 (ended)
    assert got == {
        "mean_length": 4.0,
        "min_length": 3.0,
        "max_length": 5.0,
        "clipped_ratio": 0.5,
        "mean_terminated_length": 3.0,
        "min_terminated_length": 3.0,
        "max_terminated_length": 3.0,
    }


def test_where_none_ended_the_lengths_of_ended_completions_are_missing(collector):
    built = collector(lengths=(5, 5, 5, 5))
    collect(built)
    got = reduced(built)
    assert got["completions/clipped_ratio"] == 1.0 and got["completions/mean_length"] == 5.0
    assert not [name for name in got if "terminated" in name]


def test_figures_of_several_rollouts_are_weighted_by_their_rows(collector):
    built = collector()
    collect(built)  # rewards 0, 1, 0, 0; lengths 5, 3, 2, 1
    built.rewards, built.generator = RewardSet([gives(1, None, None, None)]), Fake((1, 1, 1, 1))
    collect(built)
    got = reduced(built)
    assert got["reward"] == 2 / 5  # five scored rows, not the mean of 1/4 and 1
    assert got["completions/mean_length"] == 15 / 8
    assert (got["completions/min_length"], got["completions/max_length"]) == (1.0, 5.0)


def test_what_reward_functions_log_is_averaged(collector):
    def reward(log_metric, **kwargs):
        log_metric("accuracy", 0.5)
        log_metric("accuracy", 1.0)
        return [0, 1, 2, 3]

    built = collector(reward)
    collect(built)
    assert reduced(built)["accuracy"] == 0.75


@pytest.mark.parametrize("name", ["reward", "kl", "loss", "rewards/score/mean", "completions/mean_length", "eval_x"])
def test_a_reward_function_cannot_log_under_a_name_of_the_trainers(collector, name):
    def reward(log_metric, **kwargs):
        log_metric(name, 0.5)
        return [0, 1, 2, 3]

    with pytest.raises(ValueError, match=rf"log_metric\('{name}', ...\)"):
        collect(collector(reward))


def test_the_seconds_of_each_part_are_there_once_steps_are_counted(collector):
    built = collector()
    collect(built)
    for part in ("generation", "rewards", "logprobs"):
        built.metrics.add(f"time/{part}", 0.0, 1)
    got = reduced(built)
    assert all(got[f"time/{part}"] >= 0 for part in ("generation", "rewards", "logprobs"))


# --- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_a_row_per_completion(collector, tiny_tokenizer):
    def extra(log_extra, **kwargs):
        log_extra("parsed", ["p", "q", "r", "s"])
        return [1, None, 0, 0]

    table = collect(collector(gives(0, 1, 0, 0), extra)).table
    assert list(table) == ["prompt", "completion", "score", "extra", "advantage", "finished", "length", "parsed"]
    letter = tiny_tokenizer.decode([50])
    assert table["prompt"] == ["ab", "ab", "c", "c"]
    assert table["completion"] == [letter * 5, letter * 2, letter, ""]
    assert table["score"] == [0.0, 1.0, 0.0, 0.0]
    assert table["extra"] == [1.0, None, 0.0, 0.0]  # None rather than NaN, for people to read
    # totals 1, 1 | 0, 0
    assert table["advantage"] == [0.0] * 4
    assert table["finished"] == [False, True, True, True]
    assert table["length"] == [5, 3, 2, 1]
    assert table["parsed"] == ["p", "q", "r", "s"]


@pytest.mark.parametrize("name", ["prompt", "completion", "advantage", "finished", "length", "step"])
def test_a_reward_named_as_a_column_hides_none_and_is_not_hidden(collector, name):
    plain = collect(collector(gives(0, 1, 0, 7))).table
    table = collect(collector(gives(0, 1, 0, 7, name=name))).table
    for column in set(plain) - {"score"}:
        assert table[column] == plain[column]
    own = [column for column in table if column not in plain]
    assert len(own) == 1 and name in own[0] and own[0] != "step" and table[own[0]] == [0.0, 1.0, 0.0, 7.0]


@pytest.mark.parametrize("name", ["completion", "score", "step"])
def test_an_extra_column_named_as_another_hides_none(collector, name):
    def score(log_extra, **kwargs):
        log_extra(name, [9, 9, 9, 9])
        return [0, 1, 0, 7]

    table = collect(collector(score)).table
    assert table[f"extra/{name}"] == [9, 9, 9, 9]
    assert table["score"] == [0.0, 1.0, 0.0, 7.0] and table["completion"][3] == ""
    assert "step" not in table


# --- several processes ------------------------------------------------------------------------------------------------


class Run:
    """Several processes in one: each collects, and what it gives to the others is kept for them."""

    def __init__(self, collector, plan: BatchPlan, rewards, lengths) -> None:
        self.layout = [plan.rows(rank) for rank in range(plan.world_size)]
        prompts = [{"prompt": letter} for letter in "abcdefgh"[: plan.prompts_per_rollout]]
        sent: list[torch.Tensor] = []
        self.rollouts, self.figures = [], []
        for gather in (lambda t: sent.append(t) or torch.cat([t] * plan.world_size), lambda t: torch.cat(sent)):
            self.rollouts.clear(), self.figures.clear()
            for rank, mine in enumerate(self.layout):
                built = collector(
                    gives(*[rewards[row] for row in mine]),
                    lengths=[lengths[row] for row in mine],
                    group=plan.num_generations,
                    gather=gather,
                    rank=rank,
                    layout=self.layout,
                )
                groups = plan.local_groups(rank)
                self.rollouts.append(built.collect([prompts[p] for p, _ in groups], [n for _, n in groups], seed=0))
                self.figures.append(built.metrics.reduce())


@pytest.mark.parametrize(
    ("b", "w", "s", "a", "g"), [(2, 2, 2, 2, 4), (2, 2, 2, 1, 4), (1, 2, 4, 2, 4), (1, 4, 2, 1, 4), (1, 2, 3, 3, 2)]
)
def test_a_group_that_spans_processes_has_the_statistics_of_the_whole_group(collector, b, w, s, a, g):
    plan = BatchPlan(
        per_device_train_batch_size=b,
        world_size=w,
        steps_per_generation=s,
        gradient_accumulation_steps=a,
        num_iterations=1,
        num_generations=g,
    )
    rewards = [10.0, 8.0, 3.0, 1.0, 0.0, 5.0, -2.0, 7.0][: b * w * s]
    lengths = [5, 1, 2, 3, 4, 1, 2, 3][: b * w * s]
    run = Run(collector, plan, rewards, lengths)
    expected = group_zscore(torch.tensor(rewards, dtype=torch.float64).view(-1, g)).flatten()
    for mine, rollout in zip(run.layout, run.rollouts, strict=True):
        assert rollout.batch.advantages.tolist() == pytest.approx(expected[mine].tolist(), abs=1e-6)
        assert rollout.batch.lengths == tuple(lengths[row] for row in mine)
        assert rollout.table["prompt"] == ["abcdefgh"[row // g] for row in mine]
        assert rollout.num_tokens == len(rewards) + sum(lengths)  # of all processes, one token per prompt
    # one process counts the figures of all
    assert run.figures[0]["reward"] == pytest.approx(sum(rewards) / len(rewards))
    assert run.figures[0]["completions/mean_length"] == sum(lengths) / len(lengths)
    assert all("reward" not in other for other in run.figures[1:])


def test_a_failure_on_one_process_is_told_to_the_others(collector):
    sent = []

    def keep(t):
        sent.append(t)
        return torch.cat([t, t])

    def hear(t):
        return torch.cat([t, sent.pop(0)])

    def broken(**kwargs):
        raise KeyError("nothing here")

    with pytest.raises(KeyError, match="nothing here"):
        collect(collector(broken, gather=keep, rank=1, layout=[range(4), range(4, 8)]))
    other = collector(gather=hear, layout=[range(4), range(4, 8)])
    with pytest.raises(RuntimeError, match="process 1 failed while collecting a rollout: KeyError: 'nothing here'"):
        collect(other)
