"""The reference policy: what the policy was when it was handed in, frozen.

Which of three ways keeps it depends on what is trained. A full model is copied. An adapter that starts out as a zero
is switched off. An adapter that has been trained before is remembered: its tensors, a few megabytes, are put in place
of the current ones for the time of the pass.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from torch import nn

from grpo_trainer.policy.modes import eval_mode


class FrozenCopy:
    """A copy of a model, made now and never changed.

    Args:
        model: the policy, before anything wrapped it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = copy.deepcopy(model).eval().requires_grad_(False)

    @contextlib.contextmanager
    def activate(self) -> Iterator[nn.Module]:
        """Yields the copy."""
        yield self._model


class AdapterOff:
    """The model below a new adapter.

    Args:
        model: with an adapter that does not change its output yet.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    @contextlib.contextmanager
    def activate(self) -> Iterator[nn.Module]:
        """Yields the model in eval mode with its adapter off; on and as before afterwards."""
        with eval_mode(self._model), self._model.disable_adapter():
            yield self._model


class AdapterSnapshot:
    """The model with its adapter's weights of now.

    Args:
        model: with an adapter that has been trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._then = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}

    @contextlib.contextmanager
    def activate(self) -> Iterator[nn.Module]:
        """Yields the model in eval mode with the weights of then; the very tensors of before are back afterwards."""
        parameters = {name: p for name, p in self._model.named_parameters() if name in self._then}
        now = {name: p.data for name, p in parameters.items()}
        with eval_mode(self._model):
            try:
                for name, parameter in parameters.items():
                    parameter.data = self._then[name].to(parameter.device)
                yield self._model
            finally:
                for name, parameter in parameters.items():
                    parameter.data = now[name]


def make_reference(model: nn.Module, *, handed_in_as_peft: bool) -> FrozenCopy | AdapterOff | AdapterSnapshot:
    """The reference of a policy.

    Args:
        model: the policy, on its device, before anything is wrapped around it for training.
        handed_in_as_peft: whether the user's model brought its adapter along.

    Returns:
        The reference.
    """
    if handed_in_as_peft:
        return AdapterSnapshot(model)
    return AdapterOff(model) if hasattr(model, "disable_adapter") else FrozenCopy(model)
