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


KINDS = ["full", "fresh adapter", "trained adapter", "dora", "pissa", "ia3", "whole layer beside"]


def build(kind, model):
    """A policy as it is handed in, and whether it brought its adapter along."""
    torch.manual_seed(0)
    if kind == "fresh adapter":
        model = get_peft_model(model, lora(lora_dropout=0.5))
    elif kind == "trained adapter":
        model = get_peft_model(model, lora(lora_dropout=0.5))
        train(model)
    elif kind == "dora":
        model = get_peft_model(model, lora(use_dora=True))
    elif kind == "pissa":
        model = get_peft_model(model, lora(init_lora_weights="pissa"))
    elif kind == "ia3":
        model = get_peft_model(model, IA3Config(target_modules=["v_proj"], feedforward_modules=[]))
    elif kind == "whole layer beside":
        model = get_peft_model(model, lora(modules_to_save=["lm_head"]))
    return model, kind == "trained adapter"


@pytest.fixture(params=KINDS)
def case(request, tiny_llama):
    """A policy as it is handed in, and its reference."""
    model, handed_in = build(request.param, tiny_llama())
    return model, make_reference(model, handed_in_as_peft=handed_in)


@pytest.fixture(params=KINDS)
def moving(request, tiny_llama):
    """The same, with a reference that can follow."""
    model, handed_in = build(request.param, tiny_llama())
    return model, make_reference(model, handed_in_as_peft=handed_in, moves=True)


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


# --- a reference that follows the policy ------------------------------------------------------------------------------


def test_a_reference_that_can_follow_starts_as_the_policy_too(moving):
    policy, reference = moving
    before = logprobs(policy.eval())
    assert torch.equal(reference_logprobs(reference), before)
    train(policy)
    assert torch.equal(reference_logprobs(reference), before)


def test_after_a_sync_with_alpha_1_the_reference_is_the_policy_bit_for_bit_and_stays_behind_again(moving):
    policy, reference = moving
    train(policy)
    reference.sync(policy, 1.0)
    then = logprobs(policy.eval())
    assert torch.equal(reference_logprobs(reference), then)
    train(policy)
    assert torch.equal(reference_logprobs(reference), then)
    assert not torch.equal(logprobs(policy.eval()), then)


def test_a_sync_changes_nothing_of_the_policy(moving):
    policy, reference = moving
    train(policy)
    before = state(policy)
    reference.sync(policy, 0.6)
    assert unequal(before, state(policy)) == []


def weights_inside(reference, names):
    with reference.activate() as model:
        inside = dict(model.named_parameters())
        return {name: inside[name].detach().double() for name in names}


def test_the_mixture_is_alpha_of_the_policy_and_the_rest_of_the_reference(moving):
    policy, reference = moving
    names = [name for name, p in policy.named_parameters() if p.requires_grad]
    expected = weights_inside(reference, names)
    for alpha in (0.6, 0.25):  # twice: the second starts from what the first has made
        train(policy)
        ours = {name: p.detach().double() for name, p in policy.named_parameters()}
        expected = {name: alpha * ours[name] + (1 - alpha) * expected[name] for name in names}
        reference.sync(policy, alpha)
    got = weights_inside(reference, names)
    assert any((got[name] - ours[name]).abs().max() > 1e-3 for name in names)
    for name in names:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=1e-6)


def test_mixing_the_factors_of_lora_differs_from_mixing_the_weights_by_the_product_of_the_differences(tiny_llama):
    """B_ref A_ref = alpha B A + (1 - alpha) B0 A0 - alpha (1 - alpha) (B - B0)(A - A0)."""
    policy, handed_in = build("trained adapter", tiny_llama())
    reference, alpha = make_reference(policy, handed_in_as_peft=handed_in, moves=True), 0.6
    layer = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    names = [layer + "A.default.weight", layer + "B.default.weight"]
    a0, b0 = weights_inside(reference, names).values()
    train(policy)
    a1, b1 = (dict(policy.named_parameters())[name].detach().double() for name in names)
    reference.sync(policy, alpha)
    a, b = weights_inside(reference, names).values()
    beyond = alpha * (1 - alpha) * (b1 - b0) @ (a1 - a0)
    assert beyond.abs().max() > 1e-4
    torch.testing.assert_close(b @ a, alpha * b1 @ a1 + (1 - alpha) * b0 @ a0 - beyond, rtol=0, atol=1e-6)


def test_weights_in_half_precision_are_mixed_in_float32_and_rounded_once(tiny_llama):
    model = tiny_llama().to(torch.bfloat16)
    reference = make_reference(model, handed_in_as_peft=False, moves=True)
    before = model.lm_head.weight.detach().float().clone()
    with torch.no_grad():
        model.lm_head.weight.copy_(torch.randn(model.lm_head.weight.shape))
    reference.sync(model, 0.3)
    exact = 0.3 * model.lm_head.weight.detach().double() + 0.7 * before.double()
    with reference.activate() as copy:
        assert copy.lm_head.weight.dtype == torch.bfloat16
        # one rounding to 8 bits is at most 2^-8 of the number; a product and a sum in bfloat16 are three of them
        torch.testing.assert_close(copy.lm_head.weight.double(), exact, rtol=2**-8 + 1e-6, atol=1e-7)
        # what did not move is as it was, to the last bit
        assert torch.equal(copy.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_twenty_syncs_and_passes_leave_every_bit_below_an_adapter(tiny_llama):
    policy = get_peft_model(tiny_llama().to(torch.bfloat16), lora(init_lora_weights=False))
    reference = make_reference(policy, handed_in_as_peft=False, moves=True)
    base = {name: p.detach().clone() for name, p in policy.named_parameters() if not p.requires_grad}
    for _ in range(20):
        train(policy, steps=1)
        reference.sync(policy, 0.6)
        reference_logprobs(reference)
    now = dict(policy.named_parameters())
    assert len(base) > 10
    assert all(torch.equal(now[name].view(torch.int16), tensor.view(torch.int16)) for name, tensor in base.items())


def test_a_checkpoint_holds_the_reference_once_it_has_moved_and_another_run_takes_it_up(moving, request, tiny_llama):
    policy, reference = moving
    start = reference_logprobs(reference)
    assert reference.state_dict() == {}
    train(policy)
    reference.sync(policy, 0.6)
    saved = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    expected = reference_logprobs(reference)
    train(policy)
    reference.sync(policy, 0.6)
    again, handed_in = build(request.node.callspec.params["moving"], tiny_llama())
    other = make_reference(again, handed_in_as_peft=handed_in, moves=True)
    other.load_state_dict({})
    assert torch.equal(reference_logprobs(other), start) and other.state_dict() == {}
    other.load_state_dict(saved)
    assert torch.equal(reference_logprobs(other), expected)
    assert other.state_dict().keys() == saved.keys()


def test_the_state_of_another_reference_is_refused(tiny_llama):
    policy, _ = build("fresh adapter", tiny_llama())
    moved = make_reference(policy, handed_in_as_peft=False, moves=True)
    moved.sync(policy, 1.0)
    with pytest.raises(ValueError, match=r"checkpoint holds 8 tensors .* set sync_ref_model=True, as in that run"):
        make_reference(policy, handed_in_as_peft=False).load_state_dict(moved.state_dict())
    make_reference(policy, handed_in_as_peft=False).load_state_dict({})
    wider = get_peft_model(tiny_llama(), lora(r=8))
    with pytest.raises(ValueError, match=r"reference of another model: 8 of 8 tensors, such as .*lora_A"):
        make_reference(wider, handed_in_as_peft=False, moves=True).load_state_dict(moved.state_dict())
    with pytest.raises(ValueError, match="reference of another model"):
        make_reference(tiny_llama(), handed_in_as_peft=False).load_state_dict(moved.state_dict())


def test_a_model_without_its_adapter_is_not_moved(tiny_llama):
    policy, _ = build("fresh adapter", tiny_llama())
    with pytest.raises(ValueError, match="cannot move"):
        make_reference(policy, handed_in_as_peft=False).sync(policy, 1.0)
    assert type(make_reference(policy, handed_in_as_peft=False, moves=True)) is AdapterSnapshot
