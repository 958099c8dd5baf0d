"""The model that is trained: whole, or under an adapter, over weights of few bits too."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from grpo_trainer.loading.head import cast_head_to_float32
from grpo_trainer.loading.model import base_model, is_peft
from grpo_trainer.loading.source import check_architecture, load_causal_lm

logger = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_BARE = (
    "a model in 4 or 8 bits cannot be trained itself: give peft_config=LoraConfig(...) so that an adapter is trained "
    "on top of it, or load it without quantization"
)


def load_policy(
    model: str | nn.Module,
    *,
    model_init_kwargs: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    quantization_config: Any = None,
    peft_config: Any = None,
    gradient_checkpointing: bool = False,
    cast_lm_head_to_fp32: bool = False,
) -> nn.Module:
    """The model that is trained.

    The weights are in the dtype that ``model_init_kwargs`` names, float32 if it names none; an adapter's are in
    float32 whatever lies below, because in bfloat16 1 + 1e-6 is 1 and small steps would be lost.

    Args:
        model: a hub name, a folder, ``builtin:…``, a model, or a model with an adapter.
        model_init_kwargs: of ``from_pretrained``, for a name.
        trust_remote_code: run code that the repository brings.
        quantization_config: loads a name in 4 or 8 bits; an adapter has to train on top.
        peft_config: wraps the model in a new adapter.
        gradient_checkpointing: whether activations will be recomputed; an adapter's inputs then need gradients.
        cast_lm_head_to_fp32: whether the vocabulary head is kept and computed in float32, see
            ``cast_head_to_float32``.

    Returns:
        The model.

    Raises:
        TypeError: if ``model`` is neither a name nor a model of transformers.
        ValueError: if arguments contradict each other, or the model is of a kind that cannot be trained here.
    """
    _check_arguments(model, model_init_kwargs, quantization_config, peft_config)
    policy: Any = model
    if isinstance(model, str):
        policy = load_causal_lm(model, model_init_kwargs, trust_remote_code, quantization_config)
    check_architecture(type(base_model(policy)).__name__, base_model(policy).config)
    quantized = bool(getattr(base_model(policy), "is_quantized", False))
    if quantized:
        _refuse_bare(policy, peft_config)
        _keep_differentiable(policy)
        _compute_alike_in_every_mode(policy)
        _say_once("bitsandbytes.autograd._functions")  # its remark on 8-bit inputs comes with each layer and call
    if peft_config is not None:
        policy = _wrap(policy, peft_config)
    if is_peft(policy):
        _prepare_adapter(policy)
        if gradient_checkpointing:
            base_model(policy).enable_input_require_grads()
    if cast_lm_head_to_fp32:
        cast_head_to_float32(policy)
    _report(policy)
    return policy


def lora_config(**settings: Any) -> Any:
    """A ``peft.LoraConfig`` for a causal language model.

    Args:
        **settings: its fields; those that are None keep peft's default.

    Returns:
        The configuration.
    """
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", **{k: v for k, v in settings.items() if v is not None})


def _check_arguments(model: Any, model_init_kwargs: Any, quantization_config: Any, peft_config: Any) -> None:
    """Refuses what contradicts itself before anything is loaded."""
    from transformers import PreTrainedModel

    if isinstance(model, str):
        if quantization_config is not None and "quantization_config" in (model_init_kwargs or {}):
            raise ValueError("quantization_config is given twice, also in model_init_kwargs; give it once")
        if quantization_config is not None and peft_config is None:
            raise ValueError(_BARE)
        return
    if not (isinstance(model, PreTrainedModel) or is_peft(model)):
        raise TypeError(
            f"model is a {type(model).__module__}.{type(model).__name__}; give a name, a transformers model such as "
            "AutoModelForCausalLM.from_pretrained(...), or a PeftModel"
        )
    for name, value in (("model_init_kwargs", model_init_kwargs), ("quantization_config", quantization_config)):
        if value is not None:
            raise ValueError(
                f"{name} is for a model given by name, but model is a {type(model).__name__}: give its name, or pass "
                f"{name} to from_pretrained yourself"
            )
    if is_peft(model) and peft_config is not None:
        raise ValueError(
            "model has an adapter already and peft_config asks for another. Give one of them: "
            "model.merge_and_unload() merges the first, or leave out peft_config to go on training it"
        )


def _refuse_bare(model: Any, peft_config: Any) -> None:
    trains_itself = getattr(getattr(base_model(model), "hf_quantizer", None), "is_qat_trainable", False)
    if peft_config is None and not is_peft(model) and not trains_itself:
        raise ValueError(_BARE)


def _wrap(model: nn.Module, peft_config: Any) -> nn.Module:
    """The model, frozen, with a new adapter. What lies below keeps its dtypes, in few bits too."""
    from peft import PeftConfig, get_peft_model

    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}; give a peft configuration such as peft.LoraConfig(r=16)"
        )
    _refuse_prompt_learning(peft_config)
    return get_peft_model(model, peft_config)


def _refuse_prompt_learning(peft_config: Any) -> None:
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"{type(peft_config).__name__} puts learned tokens before the prompt, which are not among the ids that are "
            "scored; use an adapter of the weights, e.g. peft.LoraConfig(r=16)"
        )


def _prepare_adapter(model: Any) -> None:
    """Refuses an adapter on the output layer; raises adapter weights to float32."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for config in model.peft_config.values():
        _refuse_prompt_learning(config)
    if isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise ValueError(
            "an adapter on the output layer is not supported: log-probs are a product with that layer's own weight, "
            "which would leave the adapter out. Remove 'lm_head' from target_modules"
        )
    for name, parameter in model.named_parameters():
        # whole layers that are trained beside the adapter (modules_to_save) keep the dtype of what feeds them
        if parameter.requires_grad and parameter.dtype in _HALF and "modules_to_save" not in name:
            parameter.data = parameter.data.float()


def _keep_differentiable(model: nn.Module) -> None:
    """Keeps 4-bit layers on the path that has a gradient.

    On a CPU with bf16 instructions, bitsandbytes repacks a layer's weights for inference at its first forward pass in
    eval mode, which generation is, and the repacked layer passes no gradient on: an adapter below it would never
    train.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]


def _compute_alike_in_every_mode(model: nn.Module) -> None:
    """Keeps 8-bit layers on one kernel.

    On a CPU, bitsandbytes multiplies with the weights brought back to the input's precision in training mode, and with
    inputs rounded to 8 bits in eval mode: completions would be drawn from, and old and reference log-probs be those of,
    another policy than the one that is trained. The kernel of training mode rounds less, so it is used in both.
    """
    if not any(hasattr(module, "init_8bit_state") for module in model.modules()):
        return
    from bitsandbytes.nn import Linear8bitLt

    class OneKernel(Linear8bitLt):
        training: bool

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mode, self.training = self.training, True
            try:
                return super().forward(x)
            finally:
                self.training = mode

    for module in model.modules():
        if type(module) is Linear8bitLt:
            module.__class__ = OneKernel


class _Once(logging.Filter):
    """Lets each message through the first time."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the message is new."""
        new = record.getMessage() not in self._seen
        self._seen.add(record.getMessage())
        return new


def _say_once(name: str) -> None:
    talker = logging.getLogger(name)
    if not any(isinstance(f, _Once) for f in talker.filters):
        talker.addFilter(_Once())


def _report(model: Any) -> None:
    """Says what is trained and in which dtype; refuses a model of which nothing is."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        remedy = (
            "load the adapter with is_trainable=True" if is_peft(model) else "call model.requires_grad_(True) before"
        )
        raise ValueError(f"no parameter of the model requires a gradient, so there is nothing to train: {remedy}")
    dtypes = {str(p.dtype).removeprefix("torch.") for p in trained}
    size, count = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in trained)
    logger.info(
        "policy %s: %.1f M numbers, %.1f M of them trained, in %s",
        type(base_model(model)).__name__,
        size / 1e6,
        count / 1e6,
        " and ".join(sorted(dtypes)),
    )
    if any(p.dtype in _HALF for p in trained):
        logger.warning(
            "weights are trained in %s: a step below about 0.2 %% of a weight is rounded away. For full precision load "
            "them in float32 (bf16=True still computes in bfloat16), or train an adapter with peft_config",
            " and ".join(sorted(dtypes & {"bfloat16", "float16"})),
        )
