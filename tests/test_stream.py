"""Tickets of a stream: every row once per reading, in order, the same whoever reads."""

from __future__ import annotations

import itertools

import pytest
import torch
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node

from grpo_trainer.sampler import BatchPlan
from grpo_trainer.stream import StreamLoader, TicketStream, check_stream, is_stream


def plan(prompts=2, iterations=1):
    return BatchPlan(
        per_device_train_batch_size=2 * prompts,
        world_size=1,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        num_iterations=iterations,
        num_generations=2,
    )


class Numbers:
    """An iterable that knows nothing of any library."""

    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return ({"prompt": str(i)} for i in range(self.count))


class TorchNumbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ({"prompt": str(i)} for i in range(5))


def tickets(dataset, count, prompts=2, iterations=1, shuffle=False, seed=0, **settings):
    stream = TicketStream(dataset, plan(prompts, iterations), shuffle=shuffle, seed=seed, **settings)
    return list(itertools.islice(iter(StreamLoader(stream)), count))


def prompts(tickets):
    return [row["prompt"] for ticket in tickets for row in ticket.rows]


def test_a_rollout_takes_the_last_rows_of_one_reading_and_the_first_of_the_next():
    found = tickets(Numbers(5), 5)
    assert prompts(found) == list("0123401234")
    assert [t.prompts for t in found] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_each_micro_step_has_its_ticket():
    found = tickets(Numbers(5), 4, iterations=2)
    assert [t.micro_step for t in found] == [0, 1, 0, 1]
    assert prompts(found) == list("01012323")


@pytest.mark.parametrize("workers", [0, 1, 2, 5])
def test_no_row_is_lost_or_doubled_by_workers(workers):
    sharded = Dataset.from_list(list(Numbers(7))).to_iterable_dataset(num_shards=3)
    for dataset, count in [(sharded, 7), (Numbers(7), 7), (TorchNumbers(), 5)]:
        twice = prompts(tickets(dataset, 2 * count, prompts=1, num_workers=workers))
        assert sorted(twice[:count]) == sorted(twice[count:]) == [str(i) for i in range(count)]


def test_a_shuffled_stream_is_shuffled_anew_in_each_reading_and_alike_for_all():
    def read(seed):
        dataset = IterableDataset.from_generator(lambda: iter(Numbers(20)))
        return prompts(tickets(dataset, 40, prompts=1, shuffle=True, seed=seed))

    first = read(seed=3)
    assert first == read(seed=3) != read(seed=4)
    assert sorted(first[:20]) == sorted(first[20:]) and first[:20] != first[20:]


def test_reading_ahead_in_workers_leaves_the_random_states_of_the_process_alone():
    state = torch.get_rng_state()
    stream = TicketStream(Numbers(4), plan(), shuffle=False, seed=0, num_workers=1)
    list(itertools.islice(iter(stream), 4))
    assert torch.equal(state, torch.get_rng_state())


def test_rows_that_are_not_kept_are_passed_over():
    found = tickets(Numbers(5), 3, keeps=lambda row, position: row["prompt"] != "1" and position != 3)
    assert prompts(found) == list("024024")
    assert [t.prompts for t in found] == [[0, 2], [4, 0], [2, 4]]


def test_a_stream_that_gives_nothing_is_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match="gave no row to train on"):
        tickets(Numbers(3), 1, keeps=lambda row, position: False)


def test_what_can_be_read_once_only_is_refused():
    with pytest.raises(ValueError, match=r"train_dataset is a generator, which can be read once only.*from_generator"):
        check_stream("train_dataset", (row for row in Numbers(3)))


def test_a_stream_split_over_processes_is_refused():
    dataset = split_dataset_by_node(Dataset.from_list(list(Numbers(4))).to_iterable_dataset(), rank=0, world_size=2)
    with pytest.raises(ValueError, match=r"split over processes.*give every process the whole stream"):
        check_stream("train_dataset", dataset)


def test_what_is_a_stream():
    assert is_stream(Numbers(2)) and is_stream(TorchNumbers())
    assert not is_stream(None) and not is_stream([{}]) and not is_stream(Dataset.from_list([{"a": 1}]))
