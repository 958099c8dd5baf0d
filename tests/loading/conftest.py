from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A folder that holds a tiny Llama in float32 and its tokenizer, as ``save_pretrained`` writes them."""
    from tests.helpers import tiny_llama, tiny_tokenizer

    folder = tmp_path_factory.mktemp("tiny-llama")
    tiny_llama().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)
