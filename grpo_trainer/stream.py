"""Prompts of a dataset without a length: read as they come, cut into rollouts, and read again when they are used up."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from grpo_trainer.sampler import BatchPlan, Ticket
from grpo_trainer.types import Row

SHUFFLE_BUFFER = 1000
"""Rows among which the next one is drawn where a stream is shuffled; the default of `datasets`."""


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can be read from its start only: it has no length, or no access by index."""
    return dataset is not None and not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"))


def check_stream(name: str, dataset: Any) -> None:
    """Checks that a stream can be read by every process from its start, as often as needed.

    Args:
        name: of the argument, for messages.
        dataset: the stream.

    Raises:
        ValueError: if it cannot be iterated, only once, or has been split over processes.
    """
    if not hasattr(dataset, "__iter__"):
        raise ValueError(f"{name} is a {type(dataset).__name__}, which holds no rows: give a dataset")
    if hasattr(dataset, "__next__"):
        raise ValueError(
            f"{name} is a {type(dataset).__name__}, which can be read once only, and a run may have to read it again: "
            "give datasets.IterableDataset.from_generator(function) or an object whose __iter__ starts anew"
        )
    if getattr(dataset, "_distributed", None) is not None:
        raise ValueError(
            f"{name} has been split over processes (split_dataset_by_node), but the completions of one prompt may be "
            "spread over several processes: give every process the whole stream, and the trainer shares it out"
        )


class TicketStream(IterableDataset):
    """A ticket for each micro-step, without end, the same on every process.

    The stream is read row by row and cut into rollouts. When it ends it is read again, as its next epoch; a rollout
    may hold the last rows of one reading and the first of the next, so no row is lost and none comes twice in between.

    Args:
        dataset: the rows. A ``datasets.IterableDataset`` is shuffled through a buffer, anew in each epoch.
        plan: the arithmetic of the run.
        shuffle: False keeps the order of the stream.
        seed: of the shuffling.
        num_workers: processes that read ahead; 0 reads in this one.
        keeps: row and its position in the stream -> whether it is used.

    Raises:
        ValueError: while it is iterated, if a whole reading gives no row that is used.
    """

    def __init__(
        self,
        dataset: Iterable[Row],
        plan: BatchPlan,
        *,
        shuffle: bool,
        seed: int,
        num_workers: int = 0,
        keeps: Callable[[Row, int], bool] = lambda row, position: True,
    ) -> None:
        self._rows = _Rows(dataset, shuffle=shuffle, seed=seed, num_workers=num_workers)
        self._plan = plan
        self._keeps = keeps

    def __iter__(self) -> Iterator[Ticket]:
        rows = self._all_rows()
        while True:
            chunk = list(itertools.islice(rows, self._plan.prompts_per_rollout))
            positions, values = [p for p, _ in chunk], [row for _, row in chunk]
            for micro_step in range(self._plan.micro_steps_per_rollout):
                yield Ticket(micro_step, positions, values)

    def _all_rows(self) -> Iterator[tuple[int, Row]]:
        """(position within its reading, row), reading after reading."""
        for epoch in itertools.count():
            used = 0
            for position, row in enumerate(self._rows.read(epoch)):
                if self._keeps(row, position):
                    used += 1
                    yield position, row
            if not used:
                raise ValueError("the train_dataset was read to its end and gave no row to train on")


class StreamOrder:
    """The prompts of a stream, rollout after rollout, for a run that asks for them itself.

    Args:
        tickets: the stream.
    """

    def __init__(self, tickets: TicketStream) -> None:
        self._tickets = tickets
        self._reading: Iterator[Ticket] = iter(())
        self._next = -1

    def rollout(self, number: int) -> Ticket:
        """The prompts of a rollout; the stream is read up to it, from its start if it lies behind.

        Args:
            number: of the rollout, counted over the whole run, from 0.

        Returns:
            Its ticket.
        """
        if not 0 <= self._next <= number:
            self._reading = (ticket for ticket in self._tickets if ticket.micro_step == 0)
            self._next = 0
        ticket = next(itertools.islice(self._reading, number - self._next, None))
        self._next = number + 1
        return ticket


class EmptyTickets(IterableDataset):
    """Tickets that name no prompts, without end: they count micro-steps, and a run asks for its prompts itself.

    Args:
        plan: the arithmetic of the run.
    """

    def __init__(self, plan: BatchPlan) -> None:
        self._plan = plan

    def __iter__(self) -> Iterator[Ticket]:
        while True:
            yield from (Ticket(micro_step, [], []) for micro_step in range(self._plan.micro_steps_per_rollout))


class StreamLoader(DataLoader):
    """A data loader whose batches are the tickets of a stream.

    Whoever skips batches, as a resumed run does, reads the stream up to its place again.

    Args:
        tickets: the stream.
    """

    def __init__(self, tickets: TicketStream | EmptyTickets) -> None:
        super().__init__(tickets, batch_size=None)


class _Rows:
    """The rows of a stream, one reading after another."""

    def __init__(self, dataset: Any, *, shuffle: bool, seed: int, num_workers: int) -> None:
        # whose rows are in shards, a share for each worker; any other is given to one worker, or each would read it all
        shared_out = hasattr(dataset, "num_shards")
        if shuffle and shared_out:
            dataset = dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        self._dataset = dataset
        self._num_workers = min(num_workers, dataset.num_shards if shared_out else 1)

    def read(self, epoch: int) -> Iterator[Row]:
        """All rows once, in the order of an epoch."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if not self._num_workers:
            return iter(self._dataset)
        source = self._dataset if isinstance(self._dataset, IterableDataset) else _Iterated(self._dataset)
        # a loader without a generator draws from the process's, which a resumed run would do at other times
        own = torch.Generator().manual_seed(epoch)
        settings: dict[str, Any] = {"batch_size": None, "num_workers": self._num_workers, "collate_fn": _as_is}
        loader = DataLoader(source, generator=own, **settings)
        return iter(loader)


class _Iterated(IterableDataset):
    """What torch reads in a worker, around any iterable."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)


def _as_is(row: Row) -> Row:
    return row
