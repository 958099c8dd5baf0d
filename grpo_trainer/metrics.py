"""Figures about a run, added up where they arise and reduced once per log.

A figure is kept as a sum and a count (or as a maximum or minimum), on the device it arises on; nothing is moved or
communicated before it is logged. A mean is therefore weighted by what it is a mean of: tokens, rows or rollouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

GatherObject = Callable[[list[Any]], list[Any]]
"""``[local object] -> objects of all processes, by rank``."""

Figure = float | Tensor


class MetricStore:
    """Sums and counts by name, since the last ``reduce``."""

    def __init__(self) -> None:
        self._means: dict[str, tuple[Tensor, Tensor]] = {}
        self._extremes: dict[tuple[str, str], Tensor] = {}
        self._latest: dict[str, float] = {}

    def add(self, name: str, total: Figure, count: Figure = 1.0) -> None:
        """Adds to a mean.

        Args:
            name: of the figure.
            total: the sum of what is averaged.
            count: of how many.
        """
        total, count = _double(total), _double(count)
        if name in self._means:
            total, count = self._means[name][0] + total, self._means[name][1] + count
        self._means[name] = (total, count)

    def add_all(self, sums: Mapping[str, tuple[Figure, Figure]]) -> None:
        """Adds to several means, from name to (sum, count)."""
        for name, (total, count) in sums.items():
            self.add(name, total, count)

    def extreme(self, name: str, value: Figure, how: str) -> None:
        """Keeps the largest (``how="max"``) or the smallest (``"min"``) value."""
        value = _double(value)
        seen = self._extremes.get((name, how))
        pick = torch.maximum if how == "max" else torch.minimum
        self._extremes[name, how] = value if seen is None else pick(seen, value)

    def latest(self, name: str, value: float) -> None:
        """Keeps the last value given; it should be the same on all processes."""
        self._latest[name] = value

    def clear(self) -> None:
        """Forgets everything."""
        self._means, self._extremes, self._latest = {}, {}, {}

    def state_dict(self) -> dict[str, Any]:
        """What has been counted since the last ``reduce``, as plain values, for a checkpoint."""
        return {
            "means": {name: (t.item(), c.item()) for name, (t, c) in _to_host(self._means).items()},
            "extremes": {key: value.item() for key, value in self._extremes.items()},
            "latest": dict(self._latest),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the place of what has been counted.

        Args:
            state: from ``state_dict``.
        """
        self._means = {name: (_double(t), _double(c)) for name, (t, c) in state["means"].items()}
        self._extremes = {key: _double(value) for key, value in state["extremes"].items()}
        self._latest = dict(state["latest"])

    def reduce(self, gather_object: GatherObject | None = None) -> dict[str, float]:
        """All figures over all processes, and an empty store.

        A figure that was never counted on any process is missing, rather than NaN.

        Args:
            gather_object: collects one object per process; None for a single process. Every process must call this
                at the same point, whatever figures it holds.

        Returns:
            name -> value.
        """
        means = {k: (t.item(), c.item()) for k, (t, c) in _to_host(self._means).items()}
        extremes = {k: v.item() for k, v in self._extremes.items()}
        mine = [(means, extremes, self._latest)]
        everyone = gather_object(mine) if gather_object else mine
        self.clear()
        return _merge(everyone)


def _merge(everyone: list[tuple[dict, dict, dict]]) -> dict[str, float]:
    sums: dict[str, tuple[float, float]] = {}
    best: dict[tuple[str, str], float] = {}
    out: dict[str, float] = {}
    for means, extremes, latest in everyone:
        for name, (total, count) in means.items():
            before = sums.get(name, (0.0, 0.0))
            sums[name] = (before[0] + total, before[1] + count)
        for key, value in extremes.items():
            best[key] = {"max": max, "min": min}[key[1]](best.get(key, value), value)
        out.update(latest)
    out.update({name: total / count for name, (total, count) in sums.items() if count})
    out.update({name: value for (name, _), value in best.items() if math.isfinite(value)})
    return out


def _to_host(means: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """The figures of a device in one transfer."""
    moved: dict[str, tuple[Tensor, Tensor]] = {}
    for device in {part.device for pair in means.values() for part in pair}:
        names = [(name, i) for name, pair in means.items() for i in (0, 1) if pair[i].device == device]
        stacked = torch.stack([means[name][i] for name, i in names]).cpu()
        for (name, i), value in zip(names, stacked, strict=True):
            pair = moved.get(name, means[name])
            moved[name] = (value, pair[1]) if i == 0 else (pair[0], value)
    return moved


def _double(value: Figure) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().double() if value.device.type != "mps" else value.detach().float()
    return torch.tensor(float(value), dtype=torch.float64)
