"""Completions of a dataset by the current policy, and what they earn: what an evaluation needs, and no more."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo_trainer.metrics import GatherObject, MetricStore
from grpo_trainer.rollout import Drawn, RolloutCollector, count_rollout
from grpo_trainer.types import Row


@dataclass(frozen=True, kw_only=True)
class SampleResult:
    """Completions of a dataset by the current policy.

    Attributes:
        rows: P dataset rows.
        completions: P lists of G texts.
        rewards: (P, G) float64, the weighted total; NaN where no reward applies.
        by_function: name of a reward -> (P, G) float64, NaN where it does not apply.
        finished: P lists of G flags, False where a completion was cut at the limit.
        lengths: P lists of G numbers of tokens.
        figures: the metrics of these completions, by the names they have in training.
    """

    rows: list[Row]
    completions: list[list[str]]
    rewards: Tensor
    by_function: dict[str, Tensor]
    finished: list[list[bool]]
    lengths: list[list[int]]
    figures: dict[str, float]


def sample(
    collector: RolloutCollector,
    rows: Sequence[Row],
    num_generations: int,
    *,
    rows_at_once: int,
    temperature: float | None = None,
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
    gather_object: GatherObject | None = None,
) -> SampleResult:
    """Draws and scores completions without credit, gradients, or old and reference log-probs.

    Args:
        collector: whose generator and rewards are used; its metrics are left alone.
        rows: P dataset rows; every process is given all of them and completes its share.
        num_generations: G, completions of each row.
        rows_at_once: most rows in one call of the generator.
        temperature: of the sampling; None takes the collector's.
        seed: equal seeds give equal completions of equal weights.
        rank: of this process.
        world_size: number of processes.
        gather_object: collects one object per process; None for a single process.

    Returns:
        The completions and rewards, the same on every process.

    Raises:
        ValueError: if a prompt or a reward is not legal.
        RuntimeError: if another process failed.
    """
    collector = dataclasses.replace(collector, metrics=MetricStore())
    sampling = collector.sampling
    if temperature is not None:
        sampling = dataclasses.replace(sampling, temperature=temperature)
    chunks = [rows[i : i + rows_at_once] for i in range(0, len(rows), rows_at_once)]
    parts: list[Any] = []
    failure: Exception | None = None
    try:
        for k in range(rank, len(chunks), world_size):
            counts = [num_generations] * len(chunks[k])
            places = range(k * rows_at_once, k * rows_at_once + len(chunks[k]))
            names = [f"row {i} of the evaluation set" for i in places]
            row_ids = [(i, c) for i in places for c in range(num_generations)]
            with random_states_of_its_own(combine_seed(seed, k)):  # a reward function may draw from them
                drawn = collector.draw(chunks[k], counts, seed=seed, sampling=sampling, names=names, row_ids=row_ids)
            parts.append((k, drawn.rewards, _facts(drawn), drawn.texts))
    except Exception as error:
        failure = error
    # every process comes here, also one that failed: the others learn of it instead of waiting
    everyone = gather_object([(failure is not None, parts)]) if gather_object else [(failure is not None, parts)]
    if failure is not None:
        raise failure
    failed = [r for r, (bad, _) in enumerate(everyone) if bad]
    if failed:
        raise RuntimeError(f"process {failed[0]} failed while drawing completions; its own message says why")
    parts = sorted((part for _, some in everyone for part in some), key=lambda part: part[0])
    rewards, facts = (torch.cat([part[i] for part in parts]) for i in (1, 2))  # (P * G, R), (P * G, 3)
    texts = [text for part in parts for text in part[3]]
    totals = collector.rewards.combine(rewards).view(len(rows), num_generations)
    store = MetricStore()
    count_rollout(store, collector.rewards.names, rewards, totals, facts, collector.silent(rewards, totals))

    def grouped(values: list[Any]) -> list[list[Any]]:
        return [values[i : i + num_generations] for i in range(0, len(values), num_generations)]

    return SampleResult(
        rows=list(rows),
        completions=grouped(texts),
        rewards=totals,
        by_function={
            name: column.view(len(rows), num_generations)
            for name, column in zip(collector.rewards.names, rewards.T, strict=True)
        },
        finished=grouped((facts[:, 2] > 0).tolist()),
        lengths=grouped(facts[:, 1].int().tolist()),
        figures=store.reduce(),
    )


@contextlib.contextmanager
def random_states_of_its_own(seed: int) -> Iterator[None]:
    """Python's, numpy's and torch's random states from a seed inside, as they were before afterwards.

    Args:
        seed: a whole number.

    Yields:
        Nothing.
    """
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def combine_seed(*parts: int) -> int:
    """One 63-bit seed out of several numbers; equal numbers give equal seeds on every machine, others do not.

    Args:
        *parts: whole numbers; how many there are counts too.

    Returns:
        The seed.
    """
    digest = hashlib.blake2b(repr(tuple(map(int, parts))).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _facts(drawn: Drawn) -> Tensor:
    """(n, 3): prompt length, completion length, finished."""
    columns = [
        [len(p.ids) for p in drawn.prompts],
        [len(ids) for ids in drawn.completions.ids],
        list(map(float, drawn.completions.finished)),
    ]
    return torch.tensor(columns, dtype=torch.float64).T
