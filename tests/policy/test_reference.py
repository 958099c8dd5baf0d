from __future__ import annotations

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from torch import nn

from grpo_trainer.policy.reference import AdapterOff, AdapterSnapshot, FrozenCopy, make_reference

IDS = torch.tensor([[5, 6, 7, 8, 9], [10, 11, 12, 13, 14]])


def lora(**settings):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})


def logprobs(model):
    with torch.no_grad():
        return model(IDS).logits.log_softmax(-1)


def reference_logprobs(reference):
    with reference.activate() as model:
        assert not any(module.training for module in model.modules())
        return logprobs(model)


def train(model, steps=3):
    """A few steps large enough to change every log-prob."""
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.05)
    model.train()
    for _ in range(steps):
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def state(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def unequal(before, after):
    return [name for name in before if not torch.equal(before[name], after[name])]


@pytest.fixture(params=["full", "fresh adapter", "trained adapter", "dora", "pissa", "ia3", "whole layer beside"])
def case(request, tiny_llama):
    """A policy as it is handed in, and its reference."""
    torch.manual_seed(0)
    model, handed_in = tiny_llama(), False
    if request.param == "fresh adapter":
        model = get_peft_model(model, lora(lora_dropout=0.5))
    elif request.param == "trained adapter":
        model, handed_in = get_peft_model(model, lora(lora_dropout=0.5)), True
        train(model)
    elif request.param == "dora":
        model = get_peft_model(model, lora(use_dora=True))
    elif request.param == "pissa":
        model = get_peft_model(model, lora(init_lora_weights="pissa"))
    elif request.param == "ia3":
        model = get_peft_model(model, IA3Config(target_modules=["v_proj"], feedforward_modules=[]))
    elif request.param == "whole layer beside":
        model = get_peft_model(model, lora(modules_to_save=["lm_head"]))
    return model, make_reference(model, handed_in_as_peft=handed_in)


def test_the_reference_is_the_policy_as_it_was_handed_in(case):
    policy, reference = case
    torch.testing.assert_close(reference_logprobs(reference), logprobs(policy.eval()), rtol=0, atol=1e-6)


def test_the_reference_does_not_move_when_the_policy_trains(case):
    policy, reference = case
    before, of_policy = reference_logprobs(reference), logprobs(policy.eval())
    train(policy)
    assert torch.equal(reference_logprobs(reference), before)
    assert (logprobs(policy.eval()) - of_policy).abs().max() > 1e-2


def test_the_policy_comes_back_bit_for_bit(case):
    policy, reference = case
    train(policy)
    weights, after = state(policy), logprobs(policy.eval())
    reference_logprobs(reference)
    assert unequal(weights, state(policy)) == []
    assert torch.equal(logprobs(policy.eval()), after)


def test_the_policy_comes_back_after_an_exception(case):
    policy, reference = case
    train(policy)
    weights, after = state(policy), logprobs(policy.eval())
    policy.train()
    with pytest.raises(RuntimeError, match="out of memory"), reference.activate():
        raise RuntimeError("out of memory")
    assert all(module.training for module in policy.modules())
    assert unequal(weights, state(policy)) == []
    assert torch.equal(logprobs(policy.eval()), after)


def test_modes_and_what_is_trained_come_back(case):
    policy, reference = case
    policy.train()
    modules = list(policy.modules())
    modules[3].training = False  # of a user who keeps one module in eval mode
    frozen = next(p for p in policy.parameters() if p.requires_grad).requires_grad_(False)  # and freezes one weight
    modes = [module.training for module in modules]
    trained = [(name, p.requires_grad) for name, p in policy.named_parameters()]
    reference_logprobs(reference)
    assert [module.training for module in modules] == modes
    assert [(name, p.requires_grad) for name, p in policy.named_parameters()] == trained
    assert not frozen.requires_grad


def test_a_reference_pass_between_forward_and_backward_changes_no_gradient(case):
    policy, reference = case
    policy.eval()
    gradients = []
    for with_reference in (False, True):
        loss = policy(IDS, labels=IDS).loss
        if with_reference:
            reference_logprobs(reference)
        loss.backward()
        gradients.append([p.grad.clone() for p in policy.parameters() if p.requires_grad])
        policy.zero_grad()
    assert len(gradients[0]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_reference_is_no_part_of_what_is_saved(case, tmp_path):
    policy, reference = case
    train(policy)
    names = set(policy.state_dict())
    reference_logprobs(reference)
    assert set(policy.state_dict()) == names
    if hasattr(policy, "peft_config"):
        assert list(policy.peft_config) == ["default"]


def test_which_reference_suits_which_policy(tiny_llama):
    def kind(model, handed_in=False):
        return type(make_reference(model, handed_in_as_peft=handed_in))

    assert kind(tiny_llama()) is FrozenCopy
    assert kind(get_peft_model(tiny_llama(), lora())) is AdapterOff
    assert kind(get_peft_model(tiny_llama(), lora(use_dora=True))) is AdapterOff
    assert kind(get_peft_model(tiny_llama(), lora(target_modules=["embed_tokens"]))) is AdapterOff  # here A is zero
    assert kind(get_peft_model(tiny_llama(), lora(modules_to_save=["lm_head"]))) is AdapterOff
    assert kind(get_peft_model(tiny_llama(), lora()), handed_in=True) is AdapterSnapshot
    assert kind(get_peft_model(tiny_llama(), lora(init_lora_weights=False))) is AdapterSnapshot
    assert kind(get_peft_model(tiny_llama(), lora(init_lora_weights="pissa"))) is AdapterSnapshot
    assert kind(get_peft_model(tiny_llama(), IA3Config(target_modules=["v_proj"], feedforward_modules=[]))) is (
        AdapterSnapshot
    )


def test_an_adapter_whose_bias_is_not_zero_is_not_switched_off(tiny_llama):
    model = get_peft_model(tiny_llama(), lora(lora_bias=True))
    assert type(make_reference(model, handed_in_as_peft=False)) is AdapterOff
    bias = next(p for name, p in model.named_parameters() if name.endswith("lora_B.default.bias"))
    nn.init.ones_(bias)
    assert type(make_reference(model, handed_in_as_peft=False)) is AdapterSnapshot


def test_a_frozen_adapter_below_the_trained_one_belongs_to_the_reference(tiny_llama):
    torch.manual_seed(0)
    model = get_peft_model(tiny_llama(), lora(init_lora_weights=False), adapter_name="sft")
    model.add_adapter("rl", lora())
    model.base_model.set_adapter(["sft", "rl"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".rl." in name)
    start = logprobs(model.eval())
    reference = make_reference(model, handed_in_as_peft=True)
    train(model)
    torch.testing.assert_close(reference_logprobs(reference), start, rtol=0, atol=1e-6)


def test_tied_weights_stay_tied_in_the_copy(tiny_llama):
    model = tiny_llama(tie_word_embeddings=True)
    with make_reference(model, handed_in_as_peft=False).activate() as copy:
        assert copy.lm_head.weight is copy.model.embed_tokens.weight
        assert copy.lm_head.weight is not model.lm_head.weight
        assert not any(p.requires_grad for p in copy.parameters())
