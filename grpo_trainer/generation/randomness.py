"""Random numbers that belong to a row: a counter-based generator, splitmix64.

A number is a function of (seed, prompt, completion, token) and of nothing else, so it does not matter which rows are
computed together, in which order, or on which process. A row's stream is splitmix64 started at the row's key: number
``t`` is ``mix(key + (t + 1) * INCREMENT)``, all modulo 2^64, and the key itself is made by the same mixing from seed,
prompt and completion. G. L. Steele, D. Lea, C. H. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_MASK = (1 << 64) - 1
_BITS = 52
"""Random bits of a uniform number: with half a step added, the largest is still a double below 1."""


def row_keys(seed: int, row_ids: Sequence[tuple[int, int]]) -> Tensor:
    """The key of each row's stream of random numbers.

    Args:
        seed: of the call.
        row_ids: B pairs (prompt, completion), what tells a row from all others under this seed.

    Returns:
        (B,) int64, the 64 bits of each key.

    Example:
        >>> row_keys(7, [(0, 0), (0, 1), (1, 0), (0, 0)]).unique().numel()
        3
    """
    start = _mix(seed + INCREMENT)
    keys = [
        _mix(_mix(start + (prompt + 1) * INCREMENT) + (completion + 1) * INCREMENT) for prompt, completion in row_ids
    ]
    return torch.tensor([_signed(key) for key in keys], dtype=torch.int64)


def uniforms(keys: Tensor, counts: Tensor) -> Tensor:
    """One number of each row's stream.

    Args:
        keys: (B,) int64 from ``row_keys``.
        counts: (B,) int64 >= 0, which number of its stream each row takes.

    Returns:
        (B,) float64, uniform in the open interval (0, 1), multiples of 2^-53.

    Example:
        >>> u = uniforms(row_keys(0, [(0, 0)] * 1000), torch.arange(1000))
        >>> 0 < u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.03
        tensor(True)
    """
    bits = keys + (counts + 1) * _signed(INCREMENT)  # int64 arithmetic wraps, as the modulus asks
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, None), strict=True):
        bits = bits ^ _shift_right(bits, shift)
        if multiplier is not None:
            bits = bits * _signed(multiplier)
    return (_shift_right(bits, 64 - _BITS).double() + 0.5) * 2.0**-_BITS


def _mix(value: int) -> int:
    """Splitmix64's finalizer on a whole number, modulo 2^64."""
    value &= _MASK
    for shift, multiplier in zip(_SHIFTS, (*_MULTIPLIERS, 1), strict=True):
        value = ((value ^ (value >> shift)) * multiplier) & _MASK
    return value


def _signed(value: int) -> int:
    """The same 64 bits, read as an int64."""
    return value - (1 << 64) if value >> 63 else value


def _shift_right(bits: Tensor, shift: int) -> Tensor:
    """Shifts zeros in, where int64's own shift repeats the sign."""
    return (bits >> shift) & ((1 << (64 - shift)) - 1)
