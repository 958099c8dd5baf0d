"""Shapes, checked where a tensor is used."""

from __future__ import annotations

from torch import Tensor


def check_shapes(names: str, **tensors: Tensor | None) -> None:
    """Checks that all tensors have one dimension per name and agree on the size of each.

    Args:
        names: the dimensions, e.g. ``"B T"``. A tensor given as ``None`` is passed over.
        **tensors: the tensors, by the names that the error should use.

    Raises:
        ValueError: if a tensor has another rank, or two tensors differ in a dimension.

    Example:
        >>> import torch
        >>> check_shapes("B T", logprobs=torch.zeros(2, 3), mask=torch.zeros(2, 4))
        Traceback (most recent call last):
        ...
        ValueError: expected all of shape (B, T), got logprobs (2, 3), mask (2, 4)
    """
    dims = names.split()
    given = {name: tuple(t.shape) for name, t in tensors.items() if t is not None}
    if any(len(shape) != len(dims) for shape in given.values()) or len(set(given.values())) > 1:
        listing = ", ".join(f"{name} {shape}" for name, shape in given.items())
        wanted = f"({dims[0]},)" if len(dims) == 1 else f"({', '.join(dims)})"
        raise ValueError(f"expected all of shape {wanted}, got {listing}")
