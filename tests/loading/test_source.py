from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, GPT2Config, GPT2Model, LlamaForSequenceClassification, T5Config

from grpo_trainer.loading import load_policy
from grpo_trainer.loading.source import fetch, folder_of


def test_the_class_is_the_one_that_the_configuration_names(llama_folder, tiny_gpt2, tiny_llama, tmp_path):
    assert type(load_policy(llama_folder)).__name__ == "LlamaForCausalLM"
    tiny_gpt2().save_pretrained(tmp_path)
    model = load_policy(str(tmp_path))
    assert type(model).__name__ == "GPT2LMHeadModel"
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(model(ids).logits, tiny_gpt2()(ids).logits)


@pytest.mark.parametrize("architectures", [None, ["OfARepositoryForCausalLM"]])
def test_without_a_known_class_the_auto_class_decides(tiny_llama, tmp_path, architectures):
    tiny_llama().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "architectures": architectures}))
    assert type(load_policy(str(tmp_path))).__name__ == "LlamaForCausalLM"


def test_settings_of_the_place_reach_the_configuration(tiny_llama, tmp_path):
    tiny_llama().save_pretrained(tmp_path / "inner")
    assert load_policy(str(tmp_path), model_init_kwargs={"subfolder": "inner"}).config.hidden_size == 64


def test_a_model_without_a_language_model_head_is_refused(tiny_llama, tmp_path):
    LlamaForSequenceClassification(tiny_llama().config).save_pretrained(tmp_path / "classifier")
    GPT2Model(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=32)).save_pretrained(tmp_path / "body")
    with pytest.raises(ValueError, match="is a LlamaForSequenceClassification, which has no language-model head"):
        load_policy(str(tmp_path / "classifier"))
    with pytest.raises(ValueError, match="is a GPT2Model, which has no language-model head"):
        load_policy(str(tmp_path / "body"))


def test_an_encoder_decoder_is_refused_before_its_weights_are_read(tmp_path):
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path)  # a folder without weights
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        load_policy(str(tmp_path))


@pytest.mark.parametrize("name", ["./absent", "../absent/model", "/absent/model", "~/absent", "runs/today/model"])
def test_a_folder_that_is_not_there_is_said_in_one_sentence(name):
    with pytest.raises(ValueError, match=r"^model '.*absent.*|model 'runs") as caught:
        load_policy(name)
    assert str(Path(name).expanduser().absolute().name) in str(caught.value)
    assert "there is no such folder (looked at /" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_that_the_hub_cannot_be_asked_for(monkeypatch):
    with pytest.raises(
        OSError, match=r"^model 'nobody/nothing' is neither a folder here nor could it be fetched"
    ) as caught:
        load_policy("nobody/nothing")
    assert "\n" not in str(caught.value)
    assert "builtin:" in str(caught.value)


def test_an_empty_folder_one_without_weights_and_a_file(tmp_path, tiny_llama):
    tiny_llama().config.save_pretrained(tmp_path / "weightless")
    with pytest.raises(OSError, match="cannot be loaded from that folder: Error no file named"):
        load_policy(str(tmp_path / "weightless"))
    with pytest.raises(ValueError, match=r"that folder holds no config\.json"):
        load_policy(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ValueError, match=r"is a file; give the folder that holds config\.json"):
        load_policy(str(tmp_path / "model.gguf"))


def test_the_folder_of_an_adapter_is_named_as_such(tiny_llama, tmp_path):
    get_peft_model(tiny_llama(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"is the folder of an adapter: give peft\.AutoPeftModelForCausalLM"):
        load_policy(str(tmp_path))
    assert folder_of(str(tmp_path), "tokenizer") == str(tmp_path)  # which may well lie beside the adapter


def test_names_of_the_hub_and_built_in_models_are_told_from_folders(monkeypatch, tmp_path, llama_folder):
    assert folder_of("owner/name", "model") == "owner/name"
    assert folder_of("gpt2", "model") == "gpt2"
    monkeypatch.setattr("grpo_trainer.loading.source.resolve_builtin", lambda name: f"{llama_folder}")
    assert fetch(AutoConfig, "builtin:anything", "model").hidden_size == 64
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    assert folder_of("gpt2", "model") == "gpt2"  # a folder here comes before the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    assert folder_of("~/gpt2", "model") == str(tmp_path / "gpt2")
