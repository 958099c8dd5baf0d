from __future__ import annotations

import torch

from grpo_trainer.generation.flight import Flight, Row


def flight(*names: int, width: int = 4) -> Flight:
    """Rows of one prompt token, told apart by a number; nothing drawn yet."""
    n = torch.tensor(names)
    return Flight(
        [Row(name, 0, 1) for name in names],
        keys=n + 100,
        last=n,
        lengths=torch.ones_like(n),
        counts=torch.zeros_like(n),
        tokens=n[:, None].repeat(1, width),
    )


def test_a_drawn_token_is_the_last_and_stands_behind_the_others():
    rows = flight(7, 8)
    rows.append(torch.tensor([1, 2]))
    rows.append(torch.tensor([3, 4]))
    assert rows.last.tolist() == [3, 4]
    assert rows.lengths.tolist() == [3, 3] and rows.counts.tolist() == [2, 2]
    assert rows.tokens.tolist() == [[7, 1, 3, 7], [8, 2, 4, 8]]


def test_tokens_that_nobody_reads_are_not_kept():
    rows = flight(7, width=0)
    rows.append(torch.tensor([1]))
    assert rows.tokens.shape == (1, 0) and rows.last.tolist() == [1]


def test_rows_are_joined_and_chosen_on_host_and_device_alike():
    rows = flight(1, 2).joined(flight(3, 4)).chosen([3, 0, 2])
    assert [row.prompt for row in rows.rows] == [4, 1, 3]
    assert rows.keys.tolist() == [104, 101, 103] and rows.last.tolist() == [4, 1, 3]
    assert rows.tokens[:, 0].tolist() == [4, 1, 3]


def test_a_row_knows_its_length():
    row = Row(prompt=0, completion=2, prompt_length=5)
    row.ids += [8, 9]
    assert row.length == 7
