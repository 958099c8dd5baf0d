from __future__ import annotations

import copy
import logging

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn
from transformers import BitsAndBytesConfig, T5Config, T5ForConditionalGeneration

from grpo_trainer.loading import load_policy
from grpo_trainer.loading.policy import _say_once


def lora(**settings):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings})


def dtypes(model, trained):
    return {p.dtype for p in model.parameters() if p.requires_grad is trained}


def test_a_model_passes_through(tiny_llama):
    model = tiny_llama()
    assert load_policy(model) is model
    adapted = get_peft_model(tiny_llama(), lora())
    assert load_policy(adapted) is adapted


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, torch.float32),
        ({}, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": torch.float16}, torch.float16),
        ({"torch_dtype": "float16"}, torch.float16),
        ({"dtype": "auto"}, torch.bfloat16),  # what the folder was saved in
    ],
)
def test_dtype_is_float32_unless_said(tiny_llama, tmp_path, given, expected):
    tiny_llama().to(torch.bfloat16).save_pretrained(tmp_path)
    kept = copy.deepcopy(given)
    assert dtypes(load_policy(str(tmp_path), model_init_kwargs=given), True) == {expected}
    assert given == kept


def test_settings_are_not_changed_by_what_from_pretrained_does_to_them(llama_folder, tiny_llama, monkeypatch):
    def greedy(loader, name, what, **options):
        options["max_memory"].clear()
        return tiny_llama()

    monkeypatch.setattr("grpo_trainer.loading.source._architecture_of", lambda *_: None)
    monkeypatch.setattr("grpo_trainer.loading.source.fetch", greedy)
    given = {"max_memory": {"cpu": "1GB"}}
    load_policy(llama_folder, model_init_kwargs=given)
    assert given == {"max_memory": {"cpu": "1GB"}}


def test_the_base_keeps_its_dtype_and_the_adapter_is_float32(llama_folder):
    model = load_policy(llama_folder, model_init_kwargs={"dtype": "bfloat16"}, peft_config=lora())
    assert dtypes(model, False) == {torch.bfloat16}
    assert dtypes(model, True) == {torch.float32}
    # one step of 1e-6 from 1: visible in float32 (spacing 1.2e-7), lost in bfloat16 (spacing 7.8e-3)
    weight = next(p for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        weight.fill_(1.0).add_(1e-6)
    assert (weight > 1.0).all()


def test_an_adapter_handed_in_half_precision_is_raised(tiny_llama):
    model = get_peft_model(tiny_llama().to(torch.bfloat16), lora(), autocast_adapter_dtype=False)
    assert dtypes(model, True) == {torch.bfloat16}
    load_policy(model)
    assert dtypes(model, True) == {torch.float32}
    assert dtypes(model, False) == {torch.bfloat16}


def test_a_layer_trained_as_a_whole_still_fits_its_neighbours(tiny_llama, caplog):
    model = tiny_llama().to(torch.bfloat16)
    policy = load_policy(model, peft_config=lora(modules_to_save=["lm_head"]))
    assert policy(torch.tensor([[5, 6]])).logits.shape == (1, 2, 256)
    assert "weights are trained in bfloat16" in caplog.text


def test_half_precision_weights_that_are_trained_get_a_warning(tiny_llama, caplog):
    load_policy(tiny_llama())
    load_policy(tiny_llama().to(torch.bfloat16), peft_config=lora())
    assert caplog.text == ""
    load_policy(tiny_llama().to(torch.bfloat16))
    assert "weights are trained in bfloat16: a step below about 0.2 % of a weight is rounded away" in caplog.text


def test_what_is_trained_is_said(tiny_llama, caplog):
    with caplog.at_level(logging.INFO, logger="grpo_trainer"):
        load_policy(tiny_llama())
    assert "policy LlamaForCausalLM: 0.1 M numbers, 0.1 M of them trained, in float32" in caplog.text


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_leaves_an_adapters_gradients_as_they_are(tiny_llama, reentrant):
    ids = torch.tensor([[5, 6, 7, 8]])
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(0)
        model = load_policy(tiny_llama(), peft_config=lora(), gradient_checkpointing=checkpointing).train()
        # with re-entrant checkpointing no gradient would reach the layers otherwise
        assert model.get_input_embeddings()(ids).requires_grad is checkpointing
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
        model(ids, labels=ids).loss.backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert len(gradients[0]) == 8  # 2 layers, 2 modules, A and B
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 1e-4, name
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"model_init_kwargs": {"dtype": "auto"}},
            "model_init_kwargs is for a model given by name, but model is a Llama",
        ),
        ({"quantization_config": object()}, "quantization_config is for a model given by name"),
        ({"peft_config": {"r": 4}}, "peft_config is a dict; give a peft configuration such as peft.LoraConfig"),
        (
            {"peft_config": PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")},
            r"PromptTuningConfig puts learned tokens before the prompt.*use an adapter of the weights, e\.g\. peft",
        ),
        ({"peft_config": lora(target_modules=["q_proj", "lm_head"])}, "Remove 'lm_head' from target_modules"),
    ],
)
def test_what_contradicts_a_model_is_refused(tiny_llama, settings, message):
    with pytest.raises(ValueError, match=message):
        load_policy(tiny_llama(), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quantization_config": object()}, r"4 or 8 bits cannot be trained itself: give peft_config=LoraConfig"),
        (
            {"quantization_config": object(), "model_init_kwargs": {"quantization_config": 1}, "peft_config": lora()},
            "quantization_config is given twice",
        ),
        ({"model_init_kwargs": {"dtype": "bfloat61"}}, r"dtype='bfloat61' is unknown\. Did you mean 'bfloat16'\?"),
    ],
)
def test_what_contradicts_a_name_is_refused(llama_folder, settings, message):
    with pytest.raises(ValueError, match=message):
        load_policy(llama_folder, **settings)


def test_a_second_adapter_is_refused(tiny_llama):
    with pytest.raises(
        ValueError, match=r"model has an adapter already and peft_config asks for another.*merge_and_unl"
    ):
        load_policy(get_peft_model(tiny_llama(), lora()), peft_config=lora())


def test_an_adapter_on_the_output_layer_is_refused_also_when_handed_in(tiny_llama):
    with pytest.raises(ValueError, match="Remove 'lm_head' from target_modules"):
        load_policy(get_peft_model(tiny_llama(), lora(target_modules=["lm_head"])))


def test_learned_tokens_before_the_prompt_are_refused_also_when_handed_in(tiny_llama):
    model = get_peft_model(tiny_llama(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"not among the ids that are scored; use an adapter of the weights"):
        load_policy(model)


def test_a_model_of_which_nothing_is_trained_is_refused(tiny_llama):
    with pytest.raises(ValueError, match=r"nothing to train: call model.requires_grad_\(True\)"):
        load_policy(tiny_llama().requires_grad_(False))
    with pytest.raises(ValueError, match="nothing to train: load the adapter with is_trainable=True"):
        load_policy(get_peft_model(tiny_llama(), lora()).requires_grad_(False))


def test_what_is_no_language_model_of_transformers_is_refused():
    with pytest.raises(TypeError, match=r"model is a torch\.nn\.modules\.linear\.Linear; give a name"):
        load_policy(nn.Linear(2, 2))
    tiny = T5Config(d_model=16, d_ff=16, d_kv=4, num_heads=2, num_layers=1, vocab_size=32, decoder_start_token_id=0)
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        load_policy(T5ForConditionalGeneration(tiny))


def test_a_remark_of_each_layer_is_heard_once(caplog):
    talker = logging.getLogger("grpo_trainer.tests.talker")
    for _ in range(2):
        _say_once(talker.name)
    for _ in range(3):
        talker.warning("cast from %s", "float32")
        talker.warning("cast from %s", "bfloat16")
    assert caplog.messages == ["cast from float32", "cast from bfloat16"]
    assert len(talker.filters) == 1


def nf4(compute_dtype=torch.bfloat16):
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=compute_dtype,
    )


@pytest.mark.slow
def test_4_bit_weights_stay_byte_for_byte_and_the_adapter_trains(llama_folder):
    model = load_policy(
        llama_folder,
        model_init_kwargs={"dtype": "bfloat16"},
        quantization_config=nf4(),
        peft_config=lora(target_modules="all-linear"),
        gradient_checkpointing=True,
    ).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert dtypes(model, False) == {torch.bfloat16, torch.uint8}  # nothing of the base was raised
    assert dtypes(model, True) == {torch.float32}
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    ids = torch.tensor([[5, 6, 7, 8]])
    model.eval().generate(ids, max_new_tokens=2, do_sample=False)  # 4-bit layers must still have a gradient after this
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    model.train()(ids, labels=ids).loss.backward()
    optimizer.step()
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    # B starts at zero, so the first gradient of every A is zero: all 14 B (2 layers, 7 modules) move, nothing else
    assert len(changed) == 14
    assert all("lora_B" in name for name in changed)
    assert all(torch.equal(b, buffers[n]) for n, b in model.named_buffers())


@pytest.mark.slow
def test_a_bare_4_bit_model_is_refused(llama_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama_folder, quantization_config=nf4())
    with pytest.raises(ValueError, match="4 or 8 bits cannot be trained itself"):
        load_policy(model)
    with pytest.raises(ValueError, match="4 or 8 bits cannot be trained itself"):
        load_policy(llama_folder, model_init_kwargs={"quantization_config": nf4()})
    assert load_policy(model, peft_config=lora()).get_base_model() is model


@pytest.mark.slow
@pytest.mark.parametrize("handed_in", [False, True])
def test_8_bit_layers_compute_alike_in_training_and_in_eval_mode(llama_folder, handed_in):
    """On a CPU the eval mode of bitsandbytes rounds inputs to 8 bits, and the training mode does not."""
    from transformers import AutoModelForCausalLM

    settings = BitsAndBytesConfig(load_in_8bit=True)
    base = AutoModelForCausalLM.from_pretrained(llama_folder, quantization_config=settings, dtype=torch.float32)
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        trained, evaluated = base.train()(ids).logits, base.eval()(ids).logits
        assert (trained - evaluated).abs().max() > 1e-4
        model = load_policy(get_peft_model(base, lora())) if handed_in else load_policy(base, peft_config=lora())
        for mode in (False, True):
            assert torch.equal(model.train(mode)(ids).logits, trained)
            assert all(module.training is mode for module in model.modules())
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.slow
def test_8_bit_layers_do_not_flood_the_log(llama_folder, caplog):
    model = load_policy(llama_folder, quantization_config=BitsAndBytesConfig(load_in_8bit=True), peft_config=lora())
    for _ in range(3):
        model(torch.tensor([[5, 6, 7]]))
    assert caplog.text.count("MatMul8bitLt: inputs will be cast") <= 1
