"""Reward models: sequence classifiers with one label."""

from __future__ import annotations

from typing import Any

from torch import nn

from grpo_trainer.loading.model import config_of
from grpo_trainer.loading.source import fetch
from grpo_trainer.loading.tokenizer import load_tokenizer


def load_reward_model(
    model: str | nn.Module, tokenizer: Any = None, *, trust_remote_code: bool = False
) -> tuple[nn.Module, Any]:
    """A sequence classifier with one label, and a tokenizer that pads on the right for it.

    Args:
        model: a name or the module.
        tokenizer: the user's, which is copied; None loads the model's.
        trust_remote_code: run code that the repository brings.

    Returns:
        The model, frozen and in eval mode, and the tokenizer.

    Raises:
        ValueError: if there is no tokenizer to be had, or the model does not score with one trained number.
    """
    from transformers import AutoModelForSequenceClassification

    tokenizer = load_tokenizer(tokenizer, model, trust_remote_code=trust_remote_code)
    tokenizer.padding_side = tokenizer.truncation_side = "right"
    classifier: Any = model
    if isinstance(model, str):
        options = {"num_labels": 1, "trust_remote_code": trust_remote_code, "output_loading_info": True}
        classifier, info = fetch(AutoModelForSequenceClassification, model, "reward model", **options)
        if info["missing_keys"]:
            raise ValueError(
                f"reward model {model!r} has no trained head: {', '.join(sorted(info['missing_keys']))} would be "
                "random numbers. Name a sequence classifier with one label."
            )
    config = config_of(classifier)
    if getattr(config, "num_labels", None) != 1:
        raise ValueError(
            f"a reward model gives one number per text, but {type(classifier).__name__} has "
            f"num_labels={getattr(config, 'num_labels', None)}: load it with num_labels=1, or wrap it in a function"
        )
    config.get_text_config().pad_token_id = tokenizer.pad_token_id  # how the classifier finds the last token
    return classifier.eval().requires_grad_(False), tokenizer
