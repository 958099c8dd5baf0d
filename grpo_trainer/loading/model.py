"""What a model says about itself, with or without an adapter around it; and its dropout, off."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import logging
import types
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)

# Base classes of every architecture, whose checks read configurations too.
_NO_ARCHITECTURE = ("torch.", "transformers.modeling_utils", "transformers.generation", "transformers.integrations")


def is_peft(model: Any) -> bool:
    """Whether a model is wrapped in an adapter."""
    if not hasattr(model, "get_base_model"):
        return False
    from peft import PeftModel

    return isinstance(model, PeftModel)


def base_model(model: Any) -> Any:
    """The model inside an adapter's wrapper, or the model itself."""
    return model.get_base_model() if is_peft(model) else model


def config_of(model: Any) -> Any:
    """The configuration of a model, under an adapter too; None if it has none."""
    return getattr(base_model(model), "config", None)


def max_context(model: nn.Module) -> int | None:
    """Most tokens that the model's positions allow; None if its configuration does not say."""
    config: Any = config_of(model)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def disable_dropout(model: nn.Module) -> None:
    """Sets every dropout of a model to 0, an adapter's included, and those that are plain numbers of a module.

    A few architectures look their dropout up in the configuration at each forward pass; there it is set to 0 in the
    configuration, which is saved with the model, and a warning says so.

    Args:
        model: changed in place.
    """
    in_config = set()
    module: Any
    for module in model.modules():
        if "Dropout" in type(module).__name__ and isinstance(getattr(module, "p", None), float):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if not _is_dropout(name):
                continue
            if isinstance(value, float):
                setattr(module, name, 0.0)
            elif isinstance(value, dict):  # an adapter's: name of the adapter -> probability
                value.update({key: 0.0 for key, p in value.items() if isinstance(p, float)})
        for name in _read_from_config(module):
            setattr(module.config, name, 0.0)
            in_config.add(f"config.{name}")
    if in_config:
        logger.warning("disable_dropout set %s to 0, where this architecture looks it up", ", ".join(sorted(in_config)))


def _is_dropout(name: str) -> bool:
    return "dropout" in name.lower() or "layerdrop" in name.lower()


def _read_from_config(module: nn.Module) -> list[str]:
    """The dropouts above 0 that a module's code reads as ``self.config.<name>``, other than when it is built."""
    config = getattr(module, "config", None)
    names: set[str] = set()
    for kind in type(module).__mro__ if config is not None else ():
        if kind.__module__.startswith(_NO_ARCHITECTURE):
            continue
        for name, method in vars(kind).items():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if code is not None and name != "__init__":
                names.update(_attributes_of_config(code))
    values = {name: getattr(config, name, None) for name in filter(_is_dropout, names)}
    return [name for name, value in values.items() if isinstance(value, float) and value > 0]


@functools.cache
def _attributes_of_config(code: types.CodeType) -> frozenset[str]:
    """Every ``x`` of which the code says ``….config.x``."""
    read = [i.argval if i.opname.startswith("LOAD_ATTR") else None for i in dis.get_instructions(code)]
    return frozenset(after for before, after in itertools.pairwise(read) if before == "config" and after)
