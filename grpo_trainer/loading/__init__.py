"""Models and tokenizers, loaded and made ready: the one door to peft and bitsandbytes.

Tokenizers and dictionaries that the user hands in are copied, not changed. A model is not: the policy is trained, and a
reward model is frozen, put into eval mode and told the padding token.
"""

from __future__ import annotations

from grpo_trainer.loading.model import base_model, disable_dropout, is_peft, max_context
from grpo_trainer.loading.policy import load_policy, lora_config
from grpo_trainer.loading.reward import load_reward_model
from grpo_trainer.loading.tokenizer import end_of_sequence_ids, load_tokenizer

__all__ = [
    "base_model",
    "disable_dropout",
    "end_of_sequence_ids",
    "is_peft",
    "load_policy",
    "load_reward_model",
    "load_tokenizer",
    "lora_config",
    "max_context",
]
