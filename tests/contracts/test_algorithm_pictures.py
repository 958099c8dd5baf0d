"""The pictures of docs/algorithms.md come from the script beside them, and show every name."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from grpo_trainer.functional.losses import POLICY_LOSSES

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs/images"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_algorithms", IMAGES / "make_algorithms.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_the_pictures_say_of_a_loss_is_said_of_one_that_is_there(script):
    assert set(script.NOTES) | set(script.SCORES) <= set(POLICY_LOSSES)


@pytest.mark.slow
def test_the_script_draws_what_the_page_shows(script, tmp_path):
    drawn = script.main(tmp_path)
    page = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
    for path in drawn:
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert f"](images/{path.name})" in page and (IMAGES / path.name).is_file()
