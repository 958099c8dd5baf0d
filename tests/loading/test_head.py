from __future__ import annotations

import copy

import pytest
import torch
from peft import LoraConfig
from torch import nn
from transformers import BitsAndBytesConfig

from grpo_trainer.generation.hf import HFGenerator
from grpo_trainer.loading import load_policy
from grpo_trainer.loading.head import Float32Linear, cast_head_to_float32
from grpo_trainer.policy.reference import FrozenCopy
from grpo_trainer.policy.scoring import completion_logprobs
from grpo_trainer.types import RolloutBatch, SamplingParams

IDS = torch.arange(5, 37)[None]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def half(request, tiny_llama):
    """A model in bfloat16 with logits large enough to be rounded visibly."""
    return tiny_llama(tie_word_embeddings=request.param, initializer_range=0.2).to(torch.bfloat16)


def seen_by(model):
    """What goes into the head of a model, as it goes in."""
    seen = []
    model.get_output_embeddings().register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    return seen


@pytest.mark.parametrize("autocast", [False, True])
def test_logits_are_the_product_in_float32_of_the_models_own_half_precision_numbers(half, autocast):
    weight = half.get_output_embeddings().weight.detach().clone()
    bare = copy.deepcopy(half)
    model = load_policy(half, cast_lm_head_to_fp32=True)
    hidden = seen_by(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits, rounded = model(IDS).logits, bare(IDS).logits
    by_hand = hidden[0].double() @ weight.double().T
    assert hidden[0].dtype == torch.bfloat16 and logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), by_hand, rtol=0, atol=2e-6)
    # without it the same product is rounded to the eight bits of bfloat16: half of 2^-7 for logits above 2
    assert rounded.dtype == torch.bfloat16
    assert (rounded.double() - by_hand).abs().max() > 2**-8


def test_float32_weights_are_not_rounded_under_autocast(tiny_llama):
    model = load_policy(tiny_llama(initializer_range=0.2), cast_lm_head_to_fp32=True)
    hidden = seen_by(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = model(IDS).logits
    by_hand = hidden[0].double() @ model.lm_head.weight.double().T
    torch.testing.assert_close(logits.double(), by_hand, rtol=0, atol=1e-5)


def test_the_embedding_keeps_its_dtype_and_its_values_and_tied_weights_stay_tied(half):
    expected = half.model.embed_tokens(IDS)
    tied = half.lm_head.weight is half.model.embed_tokens.weight
    rest = {n: p.detach().clone() for n, p in half.named_parameters() if "embed" not in n and "lm_head" not in n}
    names = list(half.state_dict())
    cast_head_to_float32(half)
    assert half.model.embed_tokens(IDS).dtype == torch.bfloat16
    assert torch.equal(half.model.embed_tokens(IDS), expected)
    assert (half.lm_head.weight is half.model.embed_tokens.weight) is tied
    assert list(half.state_dict()) == names
    parameters = dict(half.named_parameters())
    assert all(parameters[n].dtype == p.dtype and torch.equal(parameters[n], p) for n, p in rest.items())


def test_a_copy_computes_with_its_own_head(half):
    """A reference is a copy: a head that reached back into the policy would move with it."""
    model = load_policy(half, cast_lm_head_to_fp32=True)
    reference = FrozenCopy(model)
    with torch.no_grad():
        before = model(IDS).logits
        nn.init.zeros_(model.lm_head.weight)
        with reference.activate() as frozen:
            assert torch.equal(frozen(IDS).logits, before)
            assert frozen(IDS).logits.dtype == torch.float32


def batch() -> RolloutBatch:
    return RolloutBatch(
        prompt_ids=(torch.tensor([5, 6, 7]),),
        prompt_of_row=(0,),
        lengths=(4,),
        completion_ids=torch.tensor([[20, 21, 22, 23]]),
        mask=torch.ones(1, 4, dtype=torch.bool),
        advantages=torch.zeros(1),
    )


@pytest.mark.parametrize("autocast", [False, True])
def test_log_probs_are_those_of_the_float32_logits(half, autocast):
    model, hidden = load_policy(half, cast_lm_head_to_fp32=True), []
    model.model.norm.register_forward_hook(lambda module, args, out: hidden.append(out.detach()))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        scores = completion_logprobs(model, batch())
    predicting = hidden[-1].reshape(-1, 64)[2:6]  # of 3 + 4 tokens those before the last four
    logp = (predicting.double() @ model.lm_head.weight.detach().double().T).log_softmax(-1)
    assert scores.logprobs[0].tolist() == pytest.approx([logp[t, 20 + t].item() for t in range(4)], abs=1e-5)
    scores.logprobs.sum().backward()
    assert model.lm_head.weight.grad.dtype == torch.float32 and model.lm_head.weight.grad.abs().max() > 0
    assert model.model.layers[0].self_attn.q_proj.weight.grad.abs().max() > 0


def test_completions_are_drawn_from_the_float32_logits(half):
    model = load_policy(half, cast_lm_head_to_fp32=True)
    dtypes = []
    model.lm_head.register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    sampling = SamplingParams(max_new_tokens=3, eos_token_ids=(1,), pad_token_id=2)
    HFGenerator(lambda: model, lambda: torch.autocast("cpu", torch.bfloat16)).generate([[5, 6]], [2], sampling, seed=0)
    assert len(dtypes) == 3 and set(dtypes) == {torch.float32}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_adapter_trains_below_the_head_and_a_trained_head_is_cast_too(half, checkpointing):
    settings = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    if half.lm_head.weight is not half.model.embed_tokens.weight:
        settings["modules_to_save"] = ["lm_head"]
    model = load_policy(
        half, peft_config=LoraConfig(**settings), gradient_checkpointing=checkpointing, cast_lm_head_to_fp32=True
    ).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    out = model(IDS, labels=IDS)
    assert out.logits.dtype == torch.float32
    out.loss.backward()
    assert any(p.grad is not None and p.grad.abs().max() > 0 for n, p in model.named_parameters() if "lora_B" in n)
    if "modules_to_save" in settings:
        trained = model.get_output_embeddings().modules_to_save["default"]
        assert type(trained) is Float32Linear and trained.weight.grad.dtype == torch.float32


def test_a_head_that_is_no_plain_product_is_refused(tiny_llama):
    class Scaled(nn.Linear):
        def forward(self, input):
            return 2 * super().forward(input)

    model = tiny_llama()
    model.lm_head = Scaled(64, 256, bias=False)
    with pytest.raises(ValueError, match=r"cast_lm_head_to_fp32=True needs .* that of LlamaForCausalLM is a Scaled"):
        load_policy(model, cast_lm_head_to_fp32=True)


@pytest.mark.slow
def test_over_4_bits_the_head_is_float32_and_a_head_in_4_bits_is_refused(llama_folder):
    def load(**settings):
        return load_policy(
            llama_folder,
            model_init_kwargs={"dtype": "bfloat16"},
            quantization_config=BitsAndBytesConfig(load_in_4bit=True, **settings),
            peft_config=LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
            cast_lm_head_to_fp32=True,
        )

    assert load()(IDS).logits.dtype == torch.float32
    with pytest.raises(ValueError, match=r"is a Linear4bit: .*llm_int8_skip_modules=\['lm_head'\]"):
        load(llm_int8_skip_modules=["q_proj"])
