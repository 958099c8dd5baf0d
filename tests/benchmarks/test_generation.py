from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from grpo_trainer.generation.base import ENGINES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RATES = {"group": [80.4, 151.0], "generate": [40.0, 60.6], "continuous_batching": [30.0, 44.4]}


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("generation")


def rows_of(text):
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {name: rest for name, *rest in cells}


def measure(bench, monkeypatch, folder, *words):
    """The whole script with figures that are known; what it was asked to measure."""
    made = []

    def run(script, arguments, scratch, model):
        made.append(tuple(arguments))
        return {"rates": [900.0, 1700.0] if arguments[0] == "--floor" else RATES[arguments[1]]}

    monkeypatch.setattr(bench, "run", run)
    monkeypatch.setattr(bench, "DOCS", folder)
    results = folder / "generation.json"
    monkeypatch.setattr(sys, "argv", ["generation.py", "--counts", "8,16", "--results", str(results), *words])
    bench.main()
    return made, json.loads(results.read_text(encoding="utf-8"))


def test_every_engine_is_a_row_and_memory_bandwidth_is_the_last(bench, monkeypatch, tmp_path):
    page = tmp_path / "generation.md"
    page.write_text("# Generation\n\nWords.\n", encoding="utf-8")
    made, entry = measure(bench, monkeypatch, tmp_path, "--docs")
    assert {arguments[1] for arguments in made if arguments[0] == "--worker"} == ENGINES.keys() - {"auto"}
    rows = rows_of(page.read_text(encoding="utf-8"))
    assert rows == {
        "completions in flight": ["8", "16"],
        "---": ["---", "---"],
        "`group`": ["80", "151"],
        "`generate`": ["40", "61"],
        "`continuous_batching`": ["30", "44"],
        "memory bandwidth": ["900", "1700"],
    }
    assert (tmp_path / "images" / "generation.png").stat().st_size > 1000 and entry["engines"] == RATES


def test_a_second_measurement_takes_the_place_of_the_first_and_leaves_the_rest_of_the_page(
    bench, monkeypatch, tmp_path
):
    page = tmp_path / "generation.md"
    page.write_text("# Generation\n\nWords.\n", encoding="utf-8")
    measure(bench, monkeypatch, tmp_path, "--docs")
    page.write_text(page.read_text(encoding="utf-8") + "\n## After\n\nMore.\n", encoding="utf-8")
    monkeypatch.setitem(RATES, "group", [99.0, 199.0])
    made, _ = measure(bench, monkeypatch, tmp_path, "--docs", "--engines", "group")
    text = page.read_text(encoding="utf-8")
    assert [arguments[1] for arguments in made if arguments[0] == "--worker"] == ["group"]
    assert rows_of(text)["`group`"] == ["99", "199"] and rows_of(text)["`generate`"] == ["40", "61"]
    assert text.count("## How fast") == 1 and text.startswith("# Generation\n\nWords.\n\n## How fast\n")
    assert text.endswith("\n## After\n\nMore.\n")


def test_without_being_asked_the_page_is_left_alone(bench, monkeypatch, tmp_path):
    measure(bench, monkeypatch, tmp_path)
    assert not (tmp_path / "generation.md").exists() and not (tmp_path / "images").exists()
