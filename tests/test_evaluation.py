"""Seeds, and completions without credit. The rest of ``sample`` is tested through the trainer, in test_trainer.py."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest

from grpo_trainer.evaluation import combine_seed, sample


def test_other_numbers_or_another_count_of_them_give_another_seed():
    parts = [p for n in (1, 2, 3, 4) for p in itertools.product(range(4), repeat=n)]
    assert len({combine_seed(*p) for p in parts}) == len(parts) == 4 + 16 + 64 + 256
    # torch's generator on a CPU takes the low half of a seed
    assert len({combine_seed(*p) & 0xFFFFFFFF for p in parts}) == len(parts)


def test_seeds_are_the_same_everywhere_and_legal_for_torch():
    assert combine_seed(1, 2) == combine_seed(1, 2)
    assert all(0 <= combine_seed(0, k) < 2**63 for k in range(100))


@dataclass
class Broken:
    """A collector that cannot draw."""

    metrics: Any = None
    sampling: Any = None

    def draw(self, *args, **kwargs):
        raise OSError("no such row")


def test_a_process_that_fails_tells_the_others_before_it_ends():
    told = []

    def gather_object(mine):
        told.extend(mine)
        return [(False, []), *mine]

    with pytest.raises(OSError, match="no such row"):
        sample(Broken(), [{}], 2, rows_at_once=1, rank=0, world_size=2, gather_object=gather_object)
    assert told == [(True, [])]


def test_a_process_whose_neighbour_fails_ends_and_names_it():
    with pytest.raises(RuntimeError, match="process 1 failed"):
        sample(Broken(), [], 2, rows_at_once=1, world_size=2, gather_object=lambda mine: [*mine, (True, [])])
