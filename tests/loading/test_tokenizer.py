from __future__ import annotations

import pytest
from peft import LoraConfig, get_peft_model
from transformers import ProcessorMixin

from grpo_trainer.loading import end_of_sequence_ids, load_tokenizer
from tests.helpers import EOS, EOS_ID, PAD_ID


def test_the_users_tokenizer_is_copied(tiny_tokenizer):
    tiny_tokenizer.padding_side, tiny_tokenizer.pad_token = "right", None
    copied = load_tokenizer(tiny_tokenizer, "unused")
    assert (copied.padding_side, copied.pad_token) == ("left", EOS)
    assert (tiny_tokenizer.padding_side, tiny_tokenizer.pad_token) == ("right", None)
    assert copied.chat_template == tiny_tokenizer.chat_template
    # pad is the end-of-sequence id, on the left
    assert copied(["ab", "c"], padding=True)["input_ids"][1][0] == EOS_ID
    assert len(tiny_tokenizer) == len(copied) == 256


def test_a_padding_token_that_is_there_is_kept(tiny_tokenizer):
    assert load_tokenizer(tiny_tokenizer, "unused").pad_token_id == PAD_ID


def test_without_one_the_models_is_loaded(llama_folder, tiny_llama):
    assert load_tokenizer(None, llama_folder).padding_side == "left"
    model = tiny_llama()
    model.config._name_or_path = llama_folder
    assert len(load_tokenizer(None, model)) == 256
    assert len(load_tokenizer(None, get_peft_model(model, LoraConfig(target_modules=["q_proj"])))) == 256


def test_what_cannot_be_used_is_refused(tiny_tokenizer, tiny_llama):
    class Processor(ProcessorMixin):
        def __init__(self):
            pass

    with pytest.raises(ValueError, match=r"processing_class is a Processor.*images are not supported yet"):
        load_tokenizer(Processor(), "unused")
    with pytest.raises(ValueError, match="processing_class is a str, not a tokenizer"):
        load_tokenizer("gpt2", "unused")
    with pytest.raises(ValueError, match="does not say where its tokenizer is: give processing_class"):
        load_tokenizer(None, tiny_llama())
    with pytest.raises(ValueError, match=r"tokenizer './absent': there is no such folder"):
        load_tokenizer(None, "./absent")
    tiny_tokenizer.pad_token = tiny_tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a padding nor an end-of-sequence token"):
        load_tokenizer(tiny_tokenizer, "unused")


@pytest.mark.parametrize(
    ("of_model", "of_tokenizer", "expected"),
    [
        (7, EOS, (7, EOS_ID)),
        ([9, 7], EOS, (9, 7, EOS_ID)),
        ([9, EOS_ID, 9], EOS, (9, EOS_ID)),
        (EOS_ID, EOS, (EOS_ID,)),
        (None, EOS, (EOS_ID,)),
        ([7, 9], None, (7, 9)),
        (0, None, (0,)),  # an id of 0 is an id
    ],
)
def test_every_end_of_sequence_id_counts_once_in_a_fixed_order(
    tiny_llama, tiny_tokenizer, of_model, of_tokenizer, expected
):
    model = tiny_llama()
    model.generation_config.eos_token_id = of_model
    tiny_tokenizer.eos_token = of_tokenizer
    assert end_of_sequence_ids(model, tiny_tokenizer) == expected
    assert end_of_sequence_ids(get_peft_model(model, LoraConfig(target_modules=["q_proj"])), tiny_tokenizer) == expected


def test_no_end_of_sequence_id_at_all_is_refused(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    model.generation_config.eos_token_id = None
    tiny_tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"no completion could ever end: set tokenizer\.eos_token"):
        end_of_sequence_ids(model, tiny_tokenizer)
