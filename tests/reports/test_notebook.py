"""A notebook as its user sees it: real cells in a real kernel."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from grpo_trainer.reports.notebook import Output, at_end_of_cell, in_notebook

ROOT = Path(__file__).parents[2]

MAKE = """
import os
os.environ.update(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
from datasets import Dataset
from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.reports.completions import read_completions
from grpo_trainer.reports.progress import RichProgress
from grpo_trainer.reports.reward_plot import RewardPlot
from tests.helpers import tiny_llama, tiny_tokenizer

interrupt_at = None

def length(completions, trainer_state, **kwargs):
    if trainer_state.global_step == interrupt_at:
        raise KeyboardInterrupt
    return [float(len(c)) for c in completions]

rows = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three")])
config = GRPOConfig(
    OUT, per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=4, logging_steps=1,
    use_cpu=True, bf16=False, save_strategy="no", log_completions=True, eval_strategy="steps", eval_steps=2,
)
trainer = GRPOTrainer(
    tiny_llama(), length, config, rows, rows, processing_class=tiny_tokenizer(),
    callbacks=[RichProgress(tables=1), RewardPlot()],
)
"""


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """The outputs of the cells: make, train, train and interrupt, train again, look at the completions."""
    sources = [
        f"OUT = {str(tmp_path_factory.mktemp('notebook') / 'out')!r}" + MAKE,
        "trainer.train();",
        "interrupt_at = 2\ntrainer.train();",
        "interrupt_at = None\ntrainer.train();",
        "read_completions(OUT)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=300, allow_errors=True, resources=resources).execute()
    return [cell.outputs for cell in notebook.cells]


def bundles(outputs, kind: str) -> list[str]:
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def errors(outputs) -> list[str]:
    return [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]


@pytest.mark.slow
def test_a_run_is_one_bar_one_plot_and_tables_in_html(cells):
    assert errors(cells[0]) == errors(cells[1]) == []
    bar, *tables = bundles(cells[1], "text/html")
    assert '<progress value="4" max="4"' in bar
    assert re.search(r"step 4/4  reward \d\.\d{3}  \d+\.\d s a step</div>", bar)
    assert re.search(r"<div>step 2: eval_reward .*<div>step 4: eval_reward ", bar)
    assert [re.findall("<caption[^>]*>([^<]*)", t) for t in tables] == [["sampled for step 1"], ["Step 4"]]
    assert len(bundles(cells[1], "image/png")) == 1
    (printed,) = [o.text for o in cells[1] if o.output_type == "stream" and o.name == "stdout"]
    assert printed.splitlines()[1] in ("one", "two", "three")  # the first prompt, and nothing else
    assert "{" not in printed and "\x1b" not in str(cells[1])


@pytest.mark.slow
def test_an_interrupted_cell_says_where_it_stopped_and_can_be_run_again(cells):
    assert errors(cells[2])[0].startswith("KeyboardInterrupt")
    assert "stopped at step 2/4" in bundles(cells[2], "text/html")[0]
    assert errors(cells[3]) == []
    (bar, *_) = bundles(cells[3], "text/html")
    assert "step 4/4" in bar and "stopped" not in bar
    assert len(bundles(cells[3], "image/png")) == 1
    for outputs in cells[1:4]:
        assert len(bundles(outputs, "text/html")) == 3


@pytest.mark.slow
def test_completions_read_back_as_a_table(cells):
    (page,) = bundles(cells[4], "text/html")
    assert 'class="dataframe"' in page and page.count("<tr>") == 16  # 4 steps of 4, of the last run only


def test_this_is_no_notebook_and_has_no_cells():
    assert not in_notebook()
    at_end_of_cell(lambda: pytest.fail("there is no end of a cell"))


def test_what_is_shown_is_replaced_where_it_stands(notebook):
    assert in_notebook()
    output = Output()
    output.show("<b>1</b>", "1")
    output.show(b"picture", "2")
    assert notebook.shown == [{"image/png": b"picture", "text/plain": "2"}]


def test_the_end_of_a_cell_is_met_once(notebook):
    ends = []
    at_end_of_cell(lambda: ends.append(1))
    notebook.end_cell()
    notebook.end_cell()
    assert ends == [1]
