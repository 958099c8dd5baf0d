"""Tokenizers, and the tokens that end a completion."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from grpo_trainer.loading.model import base_model, config_of
from grpo_trainer.loading.source import fetch


def load_tokenizer(
    processing_class: Any, model: str | nn.Module, *, trust_remote_code: bool = False, revision: str | None = None
) -> Any:
    """A tokenizer that pads on the left and has a padding token.

    Args:
        processing_class: the user's, which is copied; None loads the model's.
        model: a name, or a model that knows the name it came from.
        trust_remote_code: run code that the repository brings.
        revision: of the repository, if it is loaded; None takes the default.

    Returns:
        The copy. Its padding token is the end-of-sequence token if it had none.

    Raises:
        ValueError: if there is none to be had, it is a processor of images or sound, or has no token to pad with.
    """
    from transformers import AutoTokenizer, ProcessorMixin

    if isinstance(processing_class, ProcessorMixin):
        raise ValueError(
            f"processing_class is a {type(processing_class).__name__}, a processor of several modalities; images are "
            "not supported yet: give processing_class=processor.tokenizer"
        )
    if processing_class is None:
        named = model if isinstance(model, str) else getattr(config_of(model), "_name_or_path", "")
        if not named:
            raise ValueError("the model does not say where its tokenizer is: give processing_class=tokenizer")
        options = {"trust_remote_code": trust_remote_code, **({"revision": revision} if revision else {})}
        tokenizer = fetch(AutoTokenizer, named, "tokenizer", **options)
    elif hasattr(processing_class, "pad_token_id"):
        tokenizer = copy.deepcopy(processing_class)
    else:
        raise ValueError(
            f"processing_class is a {type(processing_class).__name__}, not a tokenizer: give "
            "AutoTokenizer.from_pretrained(...), or None to load the model's"
        )
    tokenizer.padding_side = tokenizer.truncation_side = "left"
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise ValueError(
                "the tokenizer has neither a padding nor an end-of-sequence token: set tokenizer.pad_token"
            )
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def end_of_sequence_ids(model: nn.Module, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends a completion: those of the model's generation config and the tokenizer's.

    Args:
        model: the policy.
        tokenizer: its tokenizer.

    Returns:
        Ids, each once, the model's first.

    Raises:
        ValueError: if there is none.
    """
    config = getattr(base_model(model), "generation_config", None)
    named = getattr(config, "eos_token_id", None)
    ids = [*(named if isinstance(named, (list, tuple)) else [named]), tokenizer.eos_token_id]
    found = tuple(dict.fromkeys(int(i) for i in ids if i is not None))
    if not found:
        raise ValueError(
            "neither model.generation_config nor the tokenizer names an end-of-sequence token, so no completion could "
            "ever end: set tokenizer.eos_token"
        )
    return found
