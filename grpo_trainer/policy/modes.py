"""A model's modes and attributes, borrowed and given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn


@contextlib.contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; every module is as it was afterwards, also after an exception.

    Args:
        model: the model.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextlib.contextmanager
def set_for_now(owner: Any, values: Mapping[str, Any]) -> Iterator[None]:
    """Other attributes of an object inside; as they were, or not there, afterwards, also after an exception.

    Args:
        owner: the object.
        values: name -> value.

    Example:
        >>> layer = nn.ReLU()
        >>> with set_for_now(layer, {"forward": lambda x: "another"}):
        ...     layer(1)
        'another'
        >>> "forward" in vars(layer)
        False
    """
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            elif name in vars(owner):
                delattr(owner, name)
