from __future__ import annotations

import math

import torch

from grpo_trainer.generation.randomness import row_keys, uniforms

MASK = 2**64 - 1


def splitmix64(state: int) -> int:
    """The generator as its authors print it, on whole numbers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_the_numbers_are_those_of_splitmix64():
    # its published test: the first outputs of seed 1234567
    assert splitmix64(1234567) == 6457827717110365317
    state = 1234567
    keys = torch.tensor([state, state, state - 2**64 if state >> 63 else state])
    got = uniforms(keys, torch.tensor([0, 1, 2]))
    for t in range(3):
        bits = splitmix64((state + t * 0x9E3779B97F4A7C15) & MASK) >> 12
        assert got[t].item() == (bits + 0.5) / 2**52


def test_keys_with_the_highest_bit_set_are_no_exception():
    for key in (2**63, 2**64 - 1, 0x8000_0000_0000_0001):
        signed = torch.tensor([key - 2**64])
        assert uniforms(signed, torch.tensor([0])).item() == ((splitmix64(key) >> 12) + 0.5) / 2**52


def test_the_ends_of_the_interval_are_never_reached():
    largest = (torch.tensor(2**52 - 1).double() + 0.5) * 2.0**-52
    assert largest < 1 and torch.tensor(0.5).double() * 2.0**-52 > 0


def test_a_row_is_told_from_all_others_by_seed_prompt_and_completion():
    ids = [(p, c) for p in range(40) for c in range(40)]
    keys = torch.cat([row_keys(seed, ids) for seed in (0, 1, 2**62, 2**63 - 1)])
    assert len(keys.unique()) == 4 * 1600
    assert torch.equal(row_keys(5, [(3, 7), (0, 1)]), row_keys(5, [(0, 1), (3, 7)]).flip(0))
    assert row_keys(0, []).shape == (0,)


def test_numbers_are_uniform_along_a_row_and_across_rows():
    keys = row_keys(11, [(p, c) for p in range(64) for c in range(16)])
    table = torch.stack([uniforms(keys, torch.full((1024,), t)) for t in range(64)])  # (token, row)
    flat = table.flatten()
    counts = torch.histc(flat.float(), bins=64, min=0, max=1)
    chi2 = ((counts - 1024) ** 2 / 1024).sum()
    assert chi2 < 63 + 4 * math.sqrt(2 * 63)
    # neighbours, in either direction, know nothing of each other: 1 / sqrt(65536) = .004 is one standard deviation
    for a, b in [(table[1:], table[:-1]), (table[:, 1:], table[:, :-1]), (table[:, 16:], table[:, :-16])]:
        assert abs(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]) < 0.016
