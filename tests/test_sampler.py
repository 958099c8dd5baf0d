from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from accelerate import skip_first_batches

from grpo_trainer.sampler import BatchPlan, RolloutLoader, RolloutSampler

NAMES = {
    "b": "per_device_train_batch_size",
    "w": "world_size",
    "s": "steps_per_generation",
    "a": "gradient_accumulation_steps",
    "mu": "num_iterations",
    "g": "num_generations",
}


def plan(**letters: int) -> BatchPlan:
    values = {"b": 2, "w": 1, "s": 3, "a": 1, "mu": 1, "g": 2, **letters}
    return BatchPlan(**{NAMES[k]: v for k, v in values.items()})


def epoch_of(num_prompts: int, shuffle: bool = False, seed: int = 0, epoch: int = 0, **letters: int) -> list:
    sampler = RolloutSampler(num_prompts, plan(**letters), shuffle=shuffle, seed=seed)
    sampler.set_epoch(epoch)
    tickets = list(sampler)
    assert len(tickets) == len(sampler)
    return tickets


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_a_rollout_holds_the_completions_of_all_its_micro_batches_and_processes():
    p = plan(b=2, w=3, s=4, mu=2, g=8)
    assert p.completions_per_rollout == 2 * 3 * 4
    assert p.prompts_per_rollout == 24 // 8
    assert p.micro_steps_per_rollout == 4 * 2
    assert [list(r) for r in p.micro_batches()] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_a_rollout_that_is_no_whole_number_of_groups_is_refused_with_what_would_be_legal():
    # 2 * 1 * 3 = 6 completions, 6 % 4 = 2. Divisors of 6 from 2 on: 2, 3, 6. With 4 slices there would be 8.
    with pytest.raises(ValueError) as error:
        plan(b=2, w=1, s=3, g=4)
    message = str(error.value)
    assert "holds 6 completions (per_device_train_batch_size=2 x 1 processes x steps_per_generation=3)" in message
    assert "num_generations=4" in message
    assert "Set steps_per_generation=4, or num_generations to one of [2, 3, 6]" in message


def test_groups_may_be_larger_than_a_micro_batch():
    assert plan(b=2, w=1, s=4, g=8).prompts_per_rollout == 1


def test_a_rollout_of_one_completion_is_refused_with_a_remedy():
    with pytest.raises(ValueError, match=r"1 completion, too few .*num_generations=4\. Set steps_per_generation=4"):
        plan(b=1, w=1, s=1, g=4)


@pytest.mark.parametrize("letters", [{"b": b, "w": w, "s": s} for b in (1, 2, 3) for w in (1, 2) for s in (1, 2, 5)])
@pytest.mark.parametrize("g", [2, 3, 4, 6, 7])
def test_a_remedy_that_is_offered_works(letters, g):
    total = math.prod(letters.values())
    if total % g == 0:
        assert plan(**letters, g=g).prompts_per_rollout == total // g
        return
    with pytest.raises(ValueError) as error:
        plan(**letters, g=g)
    fit = int(str(error.value).split("Set steps_per_generation=")[1].split(",")[0])
    assert fit > letters["s"]
    assert plan(**{**letters, "s": fit}, g=g).prompts_per_rollout >= 1


@pytest.mark.parametrize(("letter", "least"), [("b", 1), ("s", 1), ("a", 1), ("mu", 1), ("g", 2)])
def test_a_figure_below_its_least_is_refused_by_name(letter, least):
    for value in (least - 1, -1):
        with pytest.raises(ValueError, match=f"{NAMES[letter]}={value} must be at least {least}"):
            plan(**{letter: value})


def test_one_generation_per_prompt_is_refused_with_the_reason():
    with pytest.raises(ValueError, match=r"num_generations=1 must be at least 2 \(a group of one has no spread"):
        plan(g=1)


@pytest.mark.parametrize("s", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("mu", [1, 2, 3])
@pytest.mark.parametrize("a", [1, 2, 3, 4, 6, 8, 24, 32])
def test_a_rollout_outlives_its_step_if_it_is_trained_on_after_an_update(s, mu, a):
    # Walk through micro-steps: number k belongs to rollout k // (s mu) and to optimizer step k // a.
    born: dict[int, int] = {}
    outlives = False
    for k in range(math.lcm(s * mu, a)):
        outlives |= born.setdefault(k // (s * mu), k // a) != k // a
    assert plan(b=2, s=s, mu=mu, a=a).rollout_outlives_step is outlives


@pytest.mark.parametrize("w", [1, 2, 3, 4])
@pytest.mark.parametrize("a", [1, 2, 3, 4])
def test_the_processes_share_a_rollout_without_gap_or_overlap(w, a):
    for b, s, g in itertools.product((1, 2, 3, 4), (1, 2, 3, 4), (2, 3, 4, 8)):
        if b * w * s % g:
            continue
        p = plan(b=b, w=w, s=s, a=a, g=g)
        shares = [p.rows(rank) for rank in range(w)]
        assert sorted(itertools.chain(*shares)) == list(range(b * w * s))
        for rank, share in enumerate(shares):
            assert len(share) == b * s and share == sorted(share)
            # group-major over all processes: row i belongs to prompt i // g; a process generates its part of each group
            groups = p.local_groups(rank)
            assert [prompt for prompt, n in groups for _ in range(n)] == [row // g for row in share]
            assert len({prompt for prompt, _ in groups}) == len(groups)
        assert [i for part in p.micro_batches() for i in part] == list(range(b * s))


@pytest.mark.parametrize("w", [2, 3, 4])
@pytest.mark.parametrize(
    ("s", "a", "mu"), [(1, 1, 1), (4, 4, 1), (4, 2, 2), (2, 4, 1), (4, 6, 1), (3, 2, 2), (2, 3, 3)]
)
def test_a_step_trains_on_the_same_completions_however_many_processes_there_are(w, s, a, mu):
    b, g = 2, 2

    def steps(p: BatchPlan) -> list[Counter]:
        """For each optimizer step what it trains on, over all processes: (rollout, row), as often as it occurs."""
        out = [Counter() for _ in range(math.lcm(s * mu, a) // a)]
        for k in range(len(out) * a):
            rollout, slice_ = k // (s * mu), k % s
            for rank in range(p.world_size):
                out[k // a].update((rollout, p.rows(rank)[i]) for i in p.micro_batches()[slice_])
        return out

    one = plan(b=b * w, w=1, s=s, a=a, mu=mu, g=g)
    assert steps(plan(b=b, w=w, s=s, a=a, mu=mu, g=g)) == steps(one)
    assert one.rows(0) == list(range(b * w * s))


@pytest.mark.parametrize("w", [1, 2, 4])
def test_a_group_is_on_one_process_where_a_process_takes_whole_groups_at_a_time(w):
    p = plan(b=2, w=w, s=4, a=4, g=4)  # 4 * 2 rows at a time
    assert all(n == 4 for rank in range(w) for _, n in p.local_groups(rank))


# --- the order of prompts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [1, 2, 4])
def test_an_epoch_is_whole_rollouts_each_drawn_once_and_the_rest_dropped(mu):
    # 7 prompts, 2 * 3 / 2 = 3 per rollout: 2 rollouts of 3 micro-steps, mu times over; the seventh prompt is left out
    tickets = epoch_of(7, b=2, s=3, g=2, mu=mu)
    assert len(tickets) == 2 * 3 * mu
    assert [t.prompts for t in tickets] == [[0, 1, 2]] * (3 * mu) + [[3, 4, 5]] * (3 * mu)
    assert [t.micro_step for t in tickets] == [*range(3 * mu), *range(3 * mu)]


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_a_shuffled_epoch_uses_no_prompt_twice(epoch):
    tickets = epoch_of(7, shuffle=True, seed=3, epoch=epoch, b=2, s=3, g=2)
    drawn = Counter(i for t in tickets if t.micro_step == 0 for i in t.prompts)
    assert len(drawn) == 6 and set(drawn.values()) == {1}
    assert set(drawn) < set(range(7))


def test_without_shuffling_the_order_is_the_datasets_in_every_epoch():
    first = epoch_of(9, epoch=0)
    assert [i for t in first if t.micro_step == 0 for i in t.prompts] == list(range(9))
    assert epoch_of(9, epoch=1) == first


def test_epochs_and_seeds_differ_and_each_can_be_drawn_again():
    orders = {(s, e): epoch_of(50, shuffle=True, seed=s, epoch=e, b=10, s=1, g=2) for s in (0, 100) for e in (0, 1)}
    assert all(x != y for x, y in itertools.combinations(orders.values(), 2))
    assert epoch_of(50, shuffle=True, seed=100, epoch=1, b=10, s=1, g=2) == orders[100, 1]


def test_the_order_depends_on_nothing_that_happened_before():
    one = RolloutSampler(20, plan(), shuffle=True, seed=7)
    for epoch in (0, 1, 2):
        one.set_epoch(epoch)
        list(one)
    fresh = RolloutSampler(20, plan(), shuffle=True, seed=7)
    fresh.set_epoch(2)
    assert list(fresh) == list(one)
    assert sorted(fresh.order(2)) == list(range(20))


def test_every_process_sees_the_same_order_and_takes_its_own_share():
    # One rollout of 12 rows: 6 prompts in pairs. Each process makes its own sampler and knows nothing of the others.
    p = plan(b=2, w=2, s=3, g=2)
    tickets = [next(iter(RolloutSampler(30, p, shuffle=True, seed=5))) for _ in range(2)]
    assert tickets[0] == tickets[1]
    shares = [[t.prompts[i] for i, n in p.local_groups(rank) for _ in range(n)] for rank, t in enumerate(tickets)]
    assert Counter(shares[0] + shares[1]) == Counter(tickets[0].prompts * 2)


def test_global_random_state_neither_matters_nor_changes():
    import torch

    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = epoch_of(20, shuffle=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert epoch_of(20, shuffle=True) == first


@pytest.mark.parametrize(
    ("prompts", "letters", "steps"),
    # prompts * G / (b * W * A) * mu
    [
        (16, {"b": 4, "s": 2, "a": 2, "g": 4}, 8),
        (16, {"b": 4, "s": 2, "a": 2, "g": 4, "mu": 2}, 16),
        (128, {"b": 8, "s": 1, "a": 1, "g": 8}, 384 // 3),
        (128, {"b": 1, "w": 2, "s": 4, "a": 4, "g": 8}, 384 // 3),
    ],
)
def test_the_steps_of_an_epoch_are_the_users_arithmetic(prompts, letters, steps):
    tickets = epoch_of(prompts, **letters)
    assert len(tickets) / letters["a"] == steps


def test_a_dataset_smaller_than_one_rollout_is_refused_with_the_figures():
    with pytest.raises(
        ValueError, match=r"2 rows, but one rollout needs 3 prompts \(6 completions / num_generations=2"
    ):
        RolloutSampler(2, plan(), shuffle=False, seed=0)
    assert len(list(RolloutSampler(3, plan(), shuffle=False, seed=0))) == 3


# --- the loader -------------------------------------------------------------------------------------------------------


def loader(**knobs) -> RolloutLoader:
    return RolloutLoader(RolloutSampler(9, plan(), **{"shuffle": True, "seed": 4, **knobs}))


def test_a_batch_of_the_loader_is_a_ticket():
    tickets = list(loader(shuffle=False))
    assert [(t.micro_step, t.prompts) for t in tickets[:4]] == [
        (0, [0, 1, 2]),
        (1, [0, 1, 2]),
        (2, [0, 1, 2]),
        (0, [3, 4, 5]),
    ]
    assert len(tickets) == len(loader()) == 9
    assert len(loader().dataset) == 9


def test_the_loader_chooses_the_epoch():
    one = loader()
    one.set_epoch(1)
    assert list(one) == epoch_of(9, shuffle=True, seed=4, epoch=1)
    assert list(one) != list(loader())


@pytest.mark.parametrize("done", [0, 2, 3, 8, 9])
@pytest.mark.parametrize("epoch", [0, 1])
def test_skipped_batches_are_micro_steps_of_the_epoch_that_goes_on(done, epoch):
    rest = skip_first_batches(loader(), done)
    # what transformers' Trainer does when it resumes: the loader that skips wraps the sampler once more
    rest.batch_sampler.batch_sampler.set_epoch(epoch)
    assert list(rest) == epoch_of(9, shuffle=True, seed=4, epoch=epoch)[done:]
    assert len(rest) == 9 - done
