"""What every test gets: no network, one thread, a fixed seed, and the tiny models of tests/helpers.py."""

from __future__ import annotations

import os
import signal
import sys

# A shell starts what runs in its background with Ctrl-C ignored, and tests of Ctrl-C would then find nothing to test.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Before torch, transformers and wandb are imported: they read these once.
os.environ.update(
    HF_HUB_OFFLINE="1", HF_HUB_DISABLE_TELEMETRY="1", WANDB_MODE="offline", TOKENIZERS_PARALLELISM="false"
)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest

# The same examples on every machine and in every run; how long one takes is no property of the code.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def fixed_seed():
    """Each test starts from the same random state, in whatever order they run."""
    import random

    random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="session")
def tiny_llama():
    """The factory ``tiny_llama(seed=0, **config)``: each call builds a new model."""
    from tests.helpers import tiny_llama as build

    return build


@pytest.fixture(scope="session")
def tiny_gpt2():
    """The factory ``tiny_gpt2(seed=0, **config)``: each call builds a new model."""
    from tests.helpers import tiny_gpt2 as build

    return build


@pytest.fixture
def tiny_tokenizer():
    """A new character tokenizer; changing it changes no other test's."""
    from tests.helpers import tiny_tokenizer as build

    return build()
