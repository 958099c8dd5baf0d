"""A notebook's user: the shipped notebook runs, and a training cell may be run again, also after an interruption.

The interruptions are real signals, in the middle of everything that a step consists of.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import TrainerCallback

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.reports.completions import read_completions
from tests.helpers import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "notebooks" / "first_run.ipynb"

# --- the shipped notebook --------------------------------------------------------------------------------------------


def code_cells(path: Path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def bundles(outputs, kind: str) -> list[str]:
    return [output.data[kind] for output in outputs if kind in output.get("data", {})]


def assert_outputs_of_a_run(cells) -> None:
    """Ten cells, run in order without an error: one bar, one plot and one table, all of which a browser draws."""
    assert [cell.execution_count for cell in cells] == list(range(1, 11))
    assert [o.evalue for cell in cells for o in cell.outputs if o.output_type == "error"] == []
    (train,) = [cell.outputs for cell in cells if cell.id == "train"]
    bar, table = bundles(train, "text/html")
    assert '<progress value="8" max="8"' in bar
    assert re.search(r"<div>step 0: eval_reward [01]\.\d{3}</div><div>step 8: eval_reward [01]\.\d{3}</div>", bar)
    assert "Step 8</caption>" in table and table.count("<tr>") == 1 + 4
    assert len(bundles(train, "image/png")) == 1
    (completions,) = [cell.outputs for cell in cells if cell.id == "completions"]
    assert 'class="dataframe"' in bundles(completions, "text/html")[0]


def test_the_notebook_is_small_and_has_the_outputs_of_a_run():
    assert NOTEBOOK.stat().st_size < 200_000
    cells = code_cells(NOTEBOOK)
    assert max(len(cell.source.splitlines()) for cell in cells) <= 25
    assert_outputs_of_a_run(cells)
    outputs = json.dumps([cell.outputs for cell in cells])
    assert not re.search(r"/(?:home|root|tmp|usr|Users|work)/", outputs)  # no place of one machine


@pytest.mark.slow
def test_a_function_of_a_notebook_runs_in_a_worker_also_after_its_cell_was_changed(tmp_path):
    cells = [
        "from grpo_trainer.rewards.base import RewardInputs, RewardSet\n"
        "from grpo_trainer.rewards.options import RewardOptions\n"
        "scale = 2.0\n"
        "def score():\n"
        "    rewards = RewardSet([reward], options=[RewardOptions(isolation='process', time_limit=60)])\n"
        "    batch = RewardInputs(rows=[{'prompt': 'p'}], completions=['abc'], completion_ids=[[1]])\n"
        "    values = rewards.score(batch)[0].tolist()\n"
        "    rewards.close()\n"
        "    return values",
        "def reward(completions, **kwargs):\n    return [scale * len(c) for c in completions]",
        "score()",
        "async def reward(completions, **kwargs):\n    return [scale + len(c) for c in completions]",
        "score()",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}})
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert [notebook.cells[i].outputs[-1]["data"]["text/plain"] for i in (2, 4)] == ["[[6.0]]", "[[5.0]]"]


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    """A copy, so that its outputs and what it writes stay out of the repository."""
    copy = shutil.copy(NOTEBOOK, tmp_path)
    options = ["--nbmake", "--nbmake-timeout=900", "--overwrite", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, copy],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    shutil.rmtree(tmp_path / "out", ignore_errors=True)  # half a gigabyte
    assert done.returncode == 0, done.stdout[-5000:]
    assert_outputs_of_a_run(code_cells(Path(copy)))


# --- a training cell that is run again -------------------------------------------------------------------------------


QUICK = [None, "generation", "a second micro-batch"]
OTHERS = [
    *("a reward", "the old pass", "the reference pass", "backward", "the update", "a log", "a checkpoint"),
    *("an evaluation", "the reference pass by the adapter"),
]


class Interruption(TrainerCallback):
    """Ctrl-C at the armed place, once."""

    def __init__(self) -> None:
        self.armed: str | None = None
        self.generating = False
        self.micro_batches = 0

    def here(self, place: str) -> None:
        if self.armed == place:
            self.armed = None
            signal.raise_signal(signal.SIGINT)

    def watch(self, trainer: GRPOTrainer) -> None:
        """Looks at every forward and backward pass of a trainer, at its generator and its checkpoints."""
        model, collector = trainer.model, trainer.collector
        model.get_input_embeddings().register_forward_hook(lambda *_: self._forward(model))
        if not hasattr(model, "disable_adapter"):  # a frozen copy, made before the hook
            copy = collector.reference._model
            copy.get_input_embeddings().register_forward_hook(lambda *_: self.here("the reference pass"))
        next(p for p in model.parameters() if p.requires_grad).register_hook(lambda _: self.here("backward"))
        trainer._save_optimizer_and_scheduler = self._before("a checkpoint", trainer._save_optimizer_and_scheduler)
        generate = collector.generator.generate

        def marked(*args, **kwargs):
            self.generating = True
            try:
                return generate(*args, **kwargs)
            finally:
                self.generating = False

        collector.generator.generate = marked

    def _forward(self, model) -> None:
        if self.generating:
            self.here("generation")
        elif not model.training:
            off = any(module.disable_adapters for module in model.modules() if isinstance(module, BaseTunerLayer))
            self.here("the reference pass by the adapter" if off else "the old pass")
        else:
            self.micro_batches += 1
            if self.micro_batches % 2 == 0:
                self.here("a second micro-batch")

    def _before(self, place: str, function):
        def wrapped(*args, **kwargs):
            self.here(place)
            return function(*args, **kwargs)

        return wrapped

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.here("the update")

    def on_log(self, args, state, control, **kwargs):
        if state.global_step == 2:
            self.here("a log")


def trainer_to_interrupt(folder, interruption: Interruption, *, lora: bool) -> GRPOTrainer:
    """Rollouts are used twice and straddle optimizer steps, so that there is something to be left over anywhere."""

    def letters(completions, part, trainer_state, **kwargs):
        if part[0] == "heldout":
            interruption.here("an evaluation")
        elif trainer_state.global_step >= 1:
            interruption.here("a reward")
        return [float(sum(map(ord, c)) % 7) for c in completions]

    config = GRPOConfig(
        str(folder),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=3,
        num_iterations=2,
        num_generations=4,
        max_completion_length=5,
        max_steps=4,
        learning_rate=1e-2,
        beta=0.1,
        eval_strategy="steps",
        eval_steps=2,
        save_steps=2,
        logging_steps=1,
        log_completions=True,
        num_completions_to_print=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )
    rows = [{"prompt": text, "part": "train"} for text in ("one", "two", "three", "four", "five")]
    trainer = GRPOTrainer(
        tiny_llama(),
        letters,
        config,
        Dataset.from_list(rows),
        Dataset.from_list([{"prompt": "six", "part": "heldout"}]),
        processing_class=tiny_tokenizer(),
        callbacks=[interruption],
        peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None,
    )
    interruption.watch(trainer)
    return trainer


def state_of(trainer: GRPOTrainer) -> dict:
    """What training borrows and has to give back, besides the weights."""
    model = trainer.model
    modules = dict(model.named_modules())
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    return {
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "modes": {name: module.training for name, module in modules.items()},
        "checkpointing": {name: getattr(module, "gradient_checkpointing", None) for name, module in modules.items()},
        "adapters off": {n: m.disable_adapters for n, m in modules.items() if isinstance(m, BaseTunerLayer)},
        "trainable": {name: p.requires_grad for name, p in model.named_parameters()},
        "generation": (id(base.generation_config), base.generation_config.to_dict()),
        "cache": base.config.use_cache,
        "in training": trainer.is_in_train,
        "SIGTERM": signal.getsignal(signal.SIGTERM),
        "unfinished checkpoints": sorted(p.name for p in Path(trainer.args.output_dir).glob(".*")),
    }


def weights_of(trainer: GRPOTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def begin_anew(trainer: GRPOTrainer, weights: dict[str, torch.Tensor]) -> None:
    """The user's part: the weights and, since the Trainer keeps it from run to run, the optimizer."""
    trainer.model.load_state_dict(weights)
    trainer.optimizer = None


def figures_of(trainer: GRPOTrainer) -> list[dict]:
    clocks = re.compile("time|_per_second")
    return [{k: v for k, v in entry.items() if not clocks.search(k)} for entry in trainer.state.log_history]


def completions_of(trainer: GRPOTrainer) -> list:
    return read_completions(trainer.args.output_dir).values.tolist()


@pytest.mark.parametrize("place", [*QUICK, *(pytest.param(place, marks=pytest.mark.slow) for place in OTHERS)])
def test_training_again_is_as_new_also_after_an_interruption_anywhere(tmp_path, place):
    interruption = Interruption()
    trainer = trainer_to_interrupt(tmp_path, interruption, lora=place == OTHERS[-1])
    first = weights_of(trainer)
    trainer.train()
    figures, completions, last, state = (f(trainer) for f in (figures_of, completions_of, weights_of, state_of))
    assert trainer._pending  # the run has ended inside a rollout

    begin_anew(trainer, first)
    interruption.armed = place
    with pytest.raises(KeyboardInterrupt) if place else contextlib.nullcontext():
        trainer.train()
    assert interruption.armed is None
    assert state_of(trainer) == state

    begin_anew(trainer, first)
    trainer.train()
    assert figures_of(trainer) == figures
    assert completions_of(trainer) == completions
    torch.testing.assert_close(weights_of(trainer), last, rtol=0, atol=0)
    assert state_of(trainer) == state


# --- in a kernel, with transformers' own progress --------------------------------------------------------------------

MAKE = """
import asyncio, signal, threading
from datasets import Dataset
from grpo_trainer import GRPOConfig, GRPOTrainer
from tests.helpers import tiny_llama, tiny_tokenizer

interrupt = False

async def judge(completions, trainer_state, **kwargs):
    if interrupt and trainer_state.global_step == 2:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # what the stop button sends
        await asyncio.sleep(600)
    return [float(sum(map(ord, c)) % 7) for c in completions]

rows = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three")])
config = GRPOConfig(
    OUT, per_device_train_batch_size=4, num_generations=4, max_completion_length=4, max_steps=4, logging_steps=1,
    use_cpu=True, bf16=False, save_strategy="no", report_to="none", log_completions=True, eval_strategy="steps",
    eval_steps=2,
)
trainer = GRPOTrainer(tiny_llama(), judge, config, rows, rows, processing_class=tiny_tokenizer())
"""


@pytest.mark.slow
def test_a_cell_with_transformers_own_progress_is_interrupted_and_run_again(tmp_path):
    sources = [
        f"OUT = {str(tmp_path / 'out')!r}" + MAKE,
        "trainer.train();",
        "interrupt = True\ntrainer.train();",
        "interrupt = False\ntrainer.train(); trainer.train();",
        "assert 'rewards' not in [thread.name for thread in threading.enumerate()]",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=900, allow_errors=True, resources=resources).execute()
    outputs = [cell.outputs for cell in notebook.cells]
    errors = [[f"{o.ename}: {o.evalue}".strip(": ") for o in out if o.output_type == "error"] for out in outputs]
    assert errors == [[], [], ["KeyboardInterrupt"], [], []]
    pages = ["".join(bundles(out, "text/html")) for out in outputs]
    whole, (broken,), twice = (re.findall(r"\[(\d/\d) [^]]*\]", page) for page in pages[1:4])
    assert (whole, twice) == (["4/4"], ["4/4", "4/4"])
    assert broken != "4/4"
    assert [page.count("<caption") for page in pages] == [0, 1, 1, 2, 0]  # the completions, replaced where they stand
