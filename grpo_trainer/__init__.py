"""GRPO for language models on top of ``transformers.Trainer``.

``from grpo_trainer import GRPOConfig, GRPOTrainer`` is all that a training script needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from grpo_trainer.config import GRPOConfig
    from grpo_trainer.trainer import GRPOTrainer

__version__ = "0.1.0"
__all__ = ["GRPOConfig", "GRPOTrainer", "__version__"]

_LAZY = {"GRPOConfig": "grpo_trainer.config", "GRPOTrainer": "grpo_trainer.trainer"}


def __getattr__(name: str) -> Any:
    """Imports the public classes when they are first asked for, so that importing the package is quick."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
