"""Adapters, alone and over weights of few bits, really trained: what moves, what stays, what comes back from disk."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.generation.hf import HFGenerator
from grpo_trainer.loading import load_policy
from grpo_trainer.types import SamplingParams
from tests.helpers import EOS_ID, PAD_ID, tiny_llama, tiny_tokenizer

STEPS = 30
IDS = torch.arange(5, 37).view(2, 16)
SETTINGS = {
    "per_device_train_batch_size": 32,
    "num_generations": 8,
    "max_completion_length": 8,
    "max_steps": STEPS,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "beta": 0.01,
    "bf16": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "disable_tqdm": True,
}


def lora(**settings):
    return LoraConfig(
        **{"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    )


def nf4():
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )


def int8():
    return BitsAndBytesConfig(load_in_8bit=True)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How a policy is made: a new adapter over some base, or one that has been trained."""

    adapter: LoraConfig
    learning_rate: float
    base: Any = None
    handed_in: bool = False

    def load_base(self, folder):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, quantization_config=self.base() if self.base else None
        )

    def arguments(self, folder):
        """The model and the further arguments of a trainer."""
        if not self.handed_in:
            further = {"quantization_config": self.base()} if self.base else {}
            return folder, {"peft_config": self.adapter, **further}
        model = get_peft_model(self.load_base(folder), self.adapter)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(parameter, std=0.05)
        return model, {}


SLOW = pytest.mark.slow
KINDS = {
    "lora": Kind(lora(), 3e-2),
    "trained adapter": Kind(lora(), 3e-2, handed_in=True),
    "rslora": Kind(lora(use_rslora=True), 1e-2),
    "dora": Kind(lora(use_dora=True), 3e-2),
    "nf4": Kind(lora(), 1e-2, base=nf4),
    "int8": Kind(lora(), 1e-2, base=int8),
}
QUICK = ("lora", "trained adapter")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model whose logits are wide enough that adapters below its frozen head can say something."""
    path = tmp_path_factory.mktemp("base")
    tiny_llama(initializer_range=0.1).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return str(path)


def early_letters(completions, **kwargs):
    """The share of a completion's characters that stand in the first half of the vocabulary; about 0.4 at random."""
    return [sum(c < "\xa0" for c in text) / max(len(text), 1) for text in completions]


def make(out, model, *, callbacks=None, further=None, **settings):
    rows = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three", "four")])
    config = GRPOConfig(str(out), **{**SETTINGS, **settings})
    return GRPOTrainer(
        model, early_letters, config, rows, processing_class=tiny_tokenizer(), callbacks=callbacks, **(further or {})
    )


def logprobs(model):
    with torch.no_grad():
        return model.eval()(IDS).logits.float().log_softmax(-1)


def reference_logprobs(trainer):
    with trainer.collector.reference.activate() as model:
        return logprobs(model)


def digests(model):
    """A hash of every tensor that a model would save; of quantised layers also the scales and tables."""
    return {
        name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
        if isinstance(tensor, torch.Tensor)
    }


@dataclasses.dataclass(frozen=True)
class Run:
    """A training that has ended, and how it began."""

    kind: Kind
    trainer: GRPOTrainer
    saved: Path
    digests: dict[str, str]
    start: torch.Tensor

    def logged(self, key):
        return [entry[key] for entry in self.trainer.state.log_history if key in entry]


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name in QUICK else [SLOW]) for name in KINDS])
def run(request, folder, tmp_path_factory):
    """One training per kind, with gradient checkpointing, saved."""
    torch.manual_seed(0)
    kind, out = KINDS[request.param], tmp_path_factory.mktemp("run")
    model, further = kind.arguments(folder)
    trainer = make(out, model, further=further, learning_rate=kind.learning_rate)
    assert trainer.args.gradient_checkpointing
    before, start = digests(trainer.model), logprobs(trainer.model)
    trainer.train()
    trainer.save_model(str(out / "saved"))
    return Run(kind, trainer, out / "saved", before, start)


# --- training --------------------------------------------------------------------------------------------------------


def test_reward_rises(run):
    rewards = run.logged("reward")
    assert len(rewards) == STEPS
    assert min(rewards[-3:]) > rewards[0] + 0.15


def test_every_weight_of_the_adapter_moves_and_every_bit_below_it_stays(run):
    after = digests(run.trainer.model)
    assert after.keys() == run.digests.keys()
    changed = {name for name in after if after[name] != run.digests[name]}
    assert changed == {name for name in after if ".lora_" in name}
    if run.kind.base is nf4:
        assert any(name.endswith("nested_absmax") for name in after)  # the second quantisation is among what is hashed
    if run.kind.base is int8:
        assert any(name.endswith("SCB") for name in after)


def test_kl_is_zero_at_the_first_step_and_the_reference_stays_what_was_handed_in(run):
    kl = run.logged("kl")
    assert abs(kl[0]) < 1e-6
    assert max(kl[1:]) > 1e-2
    torch.testing.assert_close(reference_logprobs(run.trainer), run.start, rtol=0, atol=1e-6)
    assert (logprobs(run.trainer.model) - run.start).abs().max() > 0.1


def test_training_mode_computes_what_eval_mode_does(run):
    """Or completions would be drawn from another policy than the one that is trained."""
    model = run.trainer.model
    expected = logprobs(model)
    got = model.train()(IDS).logits.float().log_softmax(-1).detach()
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


def test_checkpointing_computes_twice_and_changes_no_gradient(run):
    model = run.trainer.model.train()
    block, calls = model.get_base_model().model.layers[1].mlp, []
    hook = block.register_forward_pre_hook(lambda *_: calls.append(1))
    gradients = []
    try:
        for checkpointing in (False, True):
            model.gradient_checkpointing_disable()
            if checkpointing:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            model.zero_grad()
            calls.clear()
            model(IDS, labels=IDS).loss.backward()
            assert len(calls) == 1 + checkpointing
            gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    finally:
        hook.remove()
        model.zero_grad()
    for name, gradient in gradients[0].items():
        assert gradient.abs().max() > 0, name
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-6 * gradient.abs().max().item())


def test_vocabulary_and_tokenizer_are_as_large_as_before(run):
    assert run.trainer.model.get_input_embeddings().weight.shape[0] == 256
    assert len(run.trainer.processing_class) == 256


# --- on disk, and merged ---------------------------------------------------------------------------------------------


def test_what_is_saved_is_the_adapter_alone_and_loads_as_it_was(run, folder):
    assert {p.name for p in run.saved.glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert list(run.trainer.model.peft_config) == ["default"]  # the reference is no adapter of its own
    loaded = PeftModel.from_pretrained(run.kind.load_base(folder), run.saved)
    # bitsandbytes has kernels of its own for eval mode on a CPU, which round more; the trainer does not use them
    model = loaded.train(run.kind.base is not None)
    with torch.no_grad():
        got = model(IDS).logits.float().log_softmax(-1)
    torch.testing.assert_close(got, logprobs(run.trainer.model), rtol=0, atol=1e-6)
    again = load_policy(PeftModel.from_pretrained(run.kind.load_base(folder), run.saved, is_trainable=True))
    torch.testing.assert_close(logprobs(again), logprobs(run.trainer.model), rtol=0, atol=1e-6)


def test_merged_it_is_a_plain_model_that_says_the_same_but_for_rounding(run, folder, tmp_path):
    base = run.kind.load_base(folder)
    names = set(base.state_dict())
    if run.kind.base:  # merged into few bits, the adapter would be rounded to them
        base = base.dequantize()
    merged = PeftModel.from_pretrained(base, run.saved).merge_and_unload()
    merged.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert set(loaded.state_dict()) == {name for name in names if name in loaded.state_dict()}
    assert not any("lora" in name or "base_layer" in name for name in loaded.state_dict())
    assert (logprobs(loaded) - run.start).abs().max() > 0.1
    tolerance = 1e-4 if run.kind.base is None else 5e-2
    torch.testing.assert_close(logprobs(loaded), logprobs(run.trainer.model), rtol=0, atol=tolerance)


def test_completions_are_drawn_with_the_adapter_on(run, folder):
    """The same seed, the same numbers: as from the merged model, and not as from the one below."""

    def draw(model):
        sampling = SamplingParams(max_new_tokens=8, eos_token_ids=(EOS_ID,), pad_token_id=PAD_ID)
        return HFGenerator(lambda: model).generate([[40, 41], [50]], [8, 8], sampling, seed=3).ids

    with run.trainer.collector.reference.activate() as model:
        below = draw(model)
    assert draw(run.trainer.model) != below
    if run.kind.base is None:
        merged = PeftModel.from_pretrained(run.kind.load_base(folder), run.saved).merge_and_unload()
        assert draw(run.trainer.model) == draw(merged)


# --- precision and optimizers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_8bit", "paged_adamw_8bit"])
def test_each_optimizer_moves_the_adapter_over_a_half_precision_base_at_a_small_rate(tmp_path, folder, optim):
    """At 1e-6 a weight in bfloat16 would not move: 1 + 1e-6 is 1 there."""
    trainer = make(
        tmp_path,
        folder,
        further={"peft_config": lora(r=64, target_modules=["q_proj", "down_proj"])},
        optim=optim,
        learning_rate=1e-6,
        max_steps=2,
        bf16=True,
        beta=0.0,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    dtypes = {(".lora_" in name, p.dtype) for name, p in trainer.model.named_parameters()}
    assert dtypes == {(False, torch.bfloat16), (True, torch.float32)}
    before = digests(trainer.model)
    trainer.train()
    after = digests(trainer.model)
    assert {n for n in after if after[n] != before[n]} == {n for n in after if ".lora_" in n}
    # tensors below 4096 numbers keep a state in float32; these have 64 x 64 and more
    states = {
        value.dtype
        for state in trainer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim() > 1
    }
    assert states == {torch.float32 if optim == "adamw_torch" else torch.uint8}


def test_few_bits_without_an_adapter_are_refused_with_what_to_do(tmp_path, folder):
    with pytest.raises(ValueError, match=r"4 or 8 bits cannot be trained itself: give peft_config=LoraConfig"):
        make(tmp_path, folder, further={"quantization_config": nf4()})


# --- a reference that follows -----------------------------------------------------------------------------------------


def following(out, folder, kind, **settings):
    settings = {
        "beta": 0.1,
        "sync_ref_model": True,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 8,
        **settings,
    }
    if kind == "full":
        return make(out, folder, **settings)
    model, further = KINDS[kind].arguments(folder)
    return make(out, model, further=further, **settings)


@pytest.mark.parametrize("kind", ["full", "lora", "trained adapter"])
def test_a_reference_that_follows_is_the_policy_every_so_many_steps(tmp_path, folder, kind):
    trainer = following(tmp_path, folder, kind, ref_model_mixup_alpha=1.0, ref_model_sync_steps=2, max_steps=4)
    trainer.train()
    assert torch.equal(reference_logprobs(trainer), logprobs(trainer.model))
    # step 2 is trained against the start, step 3 against what step 2 made of it, step 4 against the same
    first, second, third, fourth = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert abs(first) < 1e-6 and abs(third) < 1e-6
    assert min(second, fourth) > 1e-5


def test_between_syncs_the_reference_stays(tmp_path, folder):
    trainer = following(tmp_path, folder, "lora", ref_model_sync_steps=3, max_steps=2)
    start = logprobs(trainer.model)
    trainer.train()
    assert torch.equal(reference_logprobs(trainer), start)
    assert trainer.collector.reference.state_dict() == {}


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_resumed_run_has_the_reference_that_it_would_have_had(tmp_path, folder, kind):
    settings = {"ref_model_mixup_alpha": 0.6, "ref_model_sync_steps": 2, "max_steps": 5}
    whole = following(tmp_path / "whole", folder, kind, **settings)
    whole.train()
    stopped = following(tmp_path / "parts", folder, kind, **settings, save_strategy="steps", save_steps=3)
    stopped.train()
    resumed = following(tmp_path / "parts", folder, kind, **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    assert torch.equal(reference_logprobs(resumed), reference_logprobs(whole))
    assert torch.equal(logprobs(resumed.model), logprobs(whole.model))


# --- the page about it ------------------------------------------------------------------------------------------------


@SLOW
def test_the_examples_of_the_page_run_from_training_to_merging(tmp_path, folder, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    train, merge = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    shutil.copytree(folder, tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(train.replace("builtin:smollm2-135m-instruct", "base"), scope)
    exec(merge, scope)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not getattr(merged, "is_quantized", False)
    assert {p.dtype for p in merged.parameters()} == {torch.bfloat16}
    # 0.003 for rounding to bfloat16; onto the weights before quantisation it would be 0.17
    assert (logprobs(merged) - logprobs(scope["trainer"].model)).abs().mean() < 0.01
