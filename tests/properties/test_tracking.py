"""What a run leaves in tracking services, read back from their own files."""

from __future__ import annotations

import inspect
import json
import os
import random
import sqlite3
import struct
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from transformers import TrainerCallback
from transformers.integrations import integration_utils
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.reports.progress import RichProgress
from grpo_trainer.reports.uploader import CompletionsUploader
from tests.helpers import tiny_llama, tiny_tokenizer

ROOT = Path(__file__).parents[2]
WORKER = Path(__file__).with_name("tracking_worker.py")
SECRET = "hf_VerySecret"
SUMMARY = {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss", "total_flos"}


# --- reading ---------------------------------------------------------------------------------------------------------


def wandb_records(path: Path):
    """The records of an offline run: a log of LevelDB's format, with W&B's own header, that holds protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, position, parts = path.read_bytes(), 7, b""
    while position < len(data):
        left = 32768 - position % 32768  # a fragment does not cross the end of a block
        if left < 7:
            position += left
            continue
        if position + 7 > len(data):
            return
        _, length, kind = struct.unpack_from("<IHB", data, position)
        if position + 7 + length > len(data):
            return  # it is still being written
        parts += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def plain(items) -> dict[str, Any]:
    return {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}


@dataclass
class WandbRun:
    """An offline run: the rows of its history, its configuration, its summary, and the files beside."""

    folder: Path

    def __post_init__(self) -> None:
        self.rows, self.config, self.summary = [], {}, {}
        for kind, record in self._finished():
            if kind == "history":
                self.rows.append(plain(record.history.item))
            elif kind in ("config", "run"):
                self.config.update(plain((record.config if kind == "config" else record.run.config).update))
            elif kind == "summary":
                self.summary.update(plain(record.summary.update))

    def _finished(self):
        """All records: W&B's own process may still write them when ``wandb.finish`` is over."""
        (log,) = self.folder.glob("run-*.wandb")
        for _ in range(600):
            records = [(record.WhichOneof("record_type"), record) for record in wandb_records(log)]
            if any(kind == "exit" for kind, _ in records):
                return records
            time.sleep(0.1)
        raise AssertionError(f"{log} has no end: {[kind for kind, _ in records]}")

    @property
    def axis(self) -> list[int]:
        return [row["train/global_step"] for row in self.rows]

    @property
    def figures(self) -> list[dict[str, Any]]:
        """The rows without tables, without what W&B adds."""
        rows = [row for row in self.rows if not is_table(row)]
        return [{k: v for k, v in row.items() if not k.startswith("_") and k != "train/global_step"} for row in rows]

    @property
    def tables(self) -> list[tuple[int, dict[str, Any]]]:
        """Step -> table, in the order in which they were logged."""
        found = []
        for row in filter(is_table, self.rows):
            path = row.get("completions/path") or row["completions"]["path"]
            found.append((row["train/global_step"], json.loads((self.folder / "files" / path).read_text())))
        return found


def is_table(row: dict[str, Any]) -> bool:
    return any(name.split("/")[0] == "completions" for name in row)


def rewritten(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry of the log history under the names that transformers gives it in a tracking service."""
    rest = {k: v for k, v in entry.items() if k not in SUMMARY and k != "step"}
    return {f"eval/{k[5:]}" if k.startswith("eval_") else f"train/{k}": v for k, v in rest.items()}


# --- runs ------------------------------------------------------------------------------------------------------------


def dice(completions, log_extra, **kwargs):
    """A reward that is part luck: what draws a random number that it should not shows in every figure."""
    log_extra("letters", [len(c) for c in completions])
    return [len(c) + random.random() + np.random.rand() + torch.rand(()).item() for c in completions]


TRAINING = [{"prompt": text} for text in ["one", "two", "three", "four", "five", "six"]]
HELD_OUT = [{"prompt": text} for text in ["seven", "eight"]]


def make(out, *, model=None, callbacks=None, **settings) -> GRPOTrainer:
    config = GRPOConfig(
        str(out),
        **{
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 5,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "logging_steps": 2,
            "bf16": False,
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "log_completions": True,
            "num_completions_to_print": 1,
            "report_to": "none",
            **settings,
        },
    )
    model = tiny_llama() if model is None else model
    tokenizer = tiny_tokenizer()
    data, held_out = Dataset.from_list(TRAINING), Dataset.from_list(HELD_OUT)
    return GRPOTrainer(model, dice, config, data, held_out, processing_class=tokenizer, callbacks=callbacks)


def homes(folder: Path) -> dict[str, str]:
    """Environment variables that make the services write below a folder."""
    names = {f"WANDB_{kind}": f"wandb-{kind.lower()}" for kind in ("DIR", "DATA_DIR", "CACHE_DIR", "CONFIG_DIR")}
    names |= {"TRACKIO_DIR": "trackio", "TENSORBOARD_LOGGING_DIR": "tensorboard"}
    for name in names.values():
        (folder / name).mkdir(parents=True)
    return {"WANDB_SILENT": "true", **{variable: str(folder / name) for variable, name in names.items()}}


def only_run(folder: Path) -> WandbRun:
    (run,) = (folder / "wandb-dir").glob("wandb/offline-run-*")
    return WandbRun(run)


@pytest.fixture(scope="session")
def services(tmp_path_factory):
    return tmp_path_factory.mktemp("services")


@pytest.fixture(scope="session")
def tracked(services):
    """A run of 5 steps with logs at 2 and 4 and evaluations at 2, 4 and 5, which reports to three services."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in homes(services).items():
            patch.setenv(name, value)
        import trackio
        import wandb

        for name, module in list(sys.modules.items()):  # read once, when it is imported, as it may have been by now
            if name.split(".")[0] == trackio.__name__ and "TRACKIO_DIR" in vars(module):
                patch.setattr(module, "TRACKIO_DIR", services / "trackio")
        tiny_llama().save_pretrained(services / "model")
        trainer = make(
            services / "out",
            model=str(services / "model"),
            eval_strategy="steps",
            eval_steps=2,
            report_to=["wandb", "trackio", "tensorboard"],
            run_name="the run",
            project="the-project",
            hub_token=SECRET,
            model_init_kwargs={"token": SECRET},
        )
        trainer.train()
        wandb.finish()
    return trainer


@pytest.fixture(scope="session")
def in_wandb(services, tracked):
    return only_run(services)


# --- Weights & Biases ------------------------------------------------------------------------------------------------


def test_every_figure_is_in_wandb_once_with_its_value(in_wandb, tracked):
    history = tracked.state.log_history
    assert [e["step"] for e in history] == [2, 2, 4, 4, 5, 5]
    assert in_wandb.figures == [pytest.approx(rewritten(entry), abs=1e-12) for entry in history]
    names = {name for row in in_wandb.figures for name in row}
    for name in ("reward", "reward_std", "rewards/dice/mean", "entropy", "clip_ratio/region_mean", "num_tokens"):
        assert f"train/{name}" in names
    assert {"train/completions/mean_length", "train/step_time", "train/loss", "eval/rewards/dice/mean"} <= names


def test_the_axis_of_wandb_never_goes_back_and_no_row_is_dropped(in_wandb, tracked):
    # a log of training and its table, an evaluation; twice, and the evaluation and the summary of the last step
    assert in_wandb.axis == [2, 2, 2, 4, 4, 4, 5, 5, 5]
    assert [row["_step"] for row in in_wandb.rows] == list(range(9))


def test_the_tables_in_wandb_are_the_files_on_disk_each_under_the_log_after_it(in_wandb, tracked, services):
    kinds = ["table" if is_table(row) else "eval" if "eval/reward" in row else "train" for row in in_wandb.rows]
    assert kinds == ["train", "table", "eval", "train", "table", "eval", "eval", "train", "table"]
    assert [step for step, _ in in_wandb.tables] == [2, 4, 5]
    for step, table in in_wandb.tables:
        file = pq.read_table(services / "out" / "completions" / f"completions_{step:05d}.parquet")
        assert (
            table["columns"]
            == file.column_names
            == [
                *("step", "prompt", "completion", "dice", "advantage", "finished", "length", "letters"),
            ]
        )
        assert table["data"] == [list(row.values()) for row in file.to_pylist()]
        assert [row[0] for row in table["data"]] == [step] * 8


def test_completions_of_an_evaluation_are_in_no_table(in_wandb, tracked, services):
    prompts = {row[1] for _, table in in_wandb.tables for row in table["data"]}
    for path in (services / "out" / "completions").iterdir():
        prompts |= set(pq.read_table(path)["prompt"].to_pylist())
    assert prompts <= {row["prompt"] for row in TRAINING}


def test_an_evaluation_is_logged_once_under_its_own_names(in_wandb):
    rows = [row for row in in_wandb.rows if any(name.startswith("eval/") for name in row)]
    assert [row["train/global_step"] for row in rows] == [2, 4, 5]
    assert not any(name.startswith("train/eval") for row in in_wandb.rows for name in row)
    assert all("train/reward" not in row for row in rows)


def test_the_summary_of_the_run_is_logged_once(in_wandb, tracked):
    last = tracked.state.log_history[-1]
    assert {name: in_wandb.summary[name] for name in SUMMARY} == {name: last[name] for name in SUMMARY}
    assert not any(name in row or f"train/{name}" in row for row in in_wandb.rows for name in SUMMARY)


def test_the_configuration_in_wandb_is_whole_and_holds_no_secret(in_wandb, tracked, services):
    expected = tracked.args.to_dict()
    names = {f.name for f in fields(GRPOConfig) if f.init}
    assert names <= in_wandb.config.keys()
    for name in ("learning_rate", "num_generations", "loss_type", "beta", "log_completions", "advantage_ddof"):
        assert in_wandb.config[name] == expected[name]
    assert in_wandb.config["hub_token"] == "<HUB_TOKEN>"
    assert in_wandb.config["model_init_kwargs"] == {"token": "<TOKEN>"}
    assert tracked.args.model_init_kwargs == {"token": SECRET}  # ours to use, still
    for path in services.rglob("*"):
        assert path.is_dir() or SECRET.encode() not in path.read_bytes(), path


# --- the others ------------------------------------------------------------------------------------------------------


def test_trackio_has_the_same_rows(in_wandb, tracked, services):
    with sqlite3.connect(services / "trackio" / "the-project.db") as database:
        rows = [json.loads(row) for (row,) in database.execute("select metrics from metrics order by step")]
        runs = {name for (name,) in database.execute("select run_name from metrics")}
        ((config,),) = database.execute("select config from configs")
    assert runs == {"the run"}
    assert [row["train/global_step"] for row in rows] == in_wandb.axis
    tables = [(row["train/global_step"], row["completions"]["_value"]) for row in rows if is_table(row)]
    expected = [(s, [dict(zip(t["columns"], row, strict=True)) for row in t["data"]]) for s, t in in_wandb.tables]
    assert tables == expected
    figures = [{k: v for k, v in row.items() if k != "train/global_step"} for row in rows if not is_table(row)]
    assert figures == [pytest.approx(row, abs=1e-12) for row in in_wandb.figures]
    assert {f.name for f in fields(GRPOConfig) if f.init} <= json.loads(config).keys()


def test_tensorboard_has_every_figure_at_its_step(tracked, services):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(services / "tensorboard"))
    events.Reload()
    found = {(name, e.step): e.value for name in events.Tags()["scalars"] for e in events.Scalars(name)}
    expected = {}
    for entry in tracked.state.log_history:
        summary = {f"train/{name}": entry[name] for name in SUMMARY & entry.keys()}
        for name, value in {**rewritten(entry), **summary}.items():
            expected[name, entry["step"]] = value
    assert found == pytest.approx(expected, rel=1e-6)  # it keeps 32 bits


def test_a_run_is_the_same_whoever_is_told_of_it(tracked, tmp_path):
    """Nothing that reports draws a random number of the run's."""
    untold = make(tmp_path, log_completions=False, eval_strategy="steps", eval_steps=2)
    untold.train()
    rewards = [[e[k] for e in t.state.log_history for k in e if k.endswith("reward")] for t in (tracked, untold)]
    assert rewards[0] == rewards[1] and len(rewards[0]) == 6


def test_none_is_none(tmp_path):
    import wandb

    trainer = make(tmp_path, report_to="none", max_steps=1)
    trainer.train()
    assert wandb.run is None
    assert (tmp_path / "completions" / "completions_00001.parquet").is_file()


def test_a_service_that_is_not_installed_is_named_with_what_installs_it(tmp_path, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"wandb to be installed.*pip install wandb"):
        make(tmp_path, report_to="wandb")


def test_a_service_that_nobody_knows_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match=r"wandbb is not supported.*tensorboard.*wandb"):
        make(tmp_path, report_to=["wandbb"])


def test_an_upload_needs_something_to_upload(tmp_path):
    with pytest.raises(ValueError, match=r"log_completions_hub_repo='me/words'.*set log_completions=True"):
        make(tmp_path, log_completions=False, log_completions_hub_repo="me/words")
    callbacks = make(tmp_path, log_completions_hub_repo="me/words").callback_handler.callbacks
    (uploader,) = [callback for callback in callbacks if isinstance(callback, CompletionsUploader)]
    assert (uploader.repo_id, uploader.folder) == ("me/words", tmp_path / "completions")


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_our_progress_stands_in_place_of_transformers_own(tmp_path, disable_tqdm):
    trainer = make(tmp_path, callbacks=[RichProgress()], disable_tqdm=disable_tqdm)
    others = make(tmp_path, disable_tqdm=disable_tqdm)
    theirs = [
        [c for c in t.callback_handler.callbacks if isinstance(c, (PrinterCallback, ProgressCallback))]
        for t in (trainer, others)
    ]
    assert [len(found) for found in theirs] == [0, 1]


def test_compute_metrics_is_no_argument_so_that_it_cannot_be_ignored():
    assert "compute_metrics" not in inspect.signature(GRPOTrainer.__init__).parameters


# --- a run in parts, and on two processes ----------------------------------------------------------------------------


class StopAfter(TrainerCallback):
    """Ends a run after a step, as if it had been killed: its checkpoint is there, the step's log is not."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_save(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


@pytest.mark.slow
def test_the_first_table_after_a_resume_is_what_it_would_have_been(tracked, tmp_path):
    """A rollout serves 4 steps, logs are at 3 and 6: the rollout of step 5 is not drawn again by who resumes at 5."""
    import wandb

    settings = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "logging_steps": 3,
        "save_strategy": "steps",
        "save_steps": 5,
        "max_steps": 9,
        "report_to": "wandb",
    }

    def run(out, resume=None, callbacks=None) -> WandbRun:
        make(tmp_path / out, callbacks=callbacks, **settings).train(resume_from_checkpoint=resume)
        folder = Path(wandb.run.dir).parent  # W&B reads only once where it is to write
        wandb.finish()
        return WandbRun(folder)

    whole = run("whole")
    before = run("parts", callbacks=[StopAfter(5)])
    after = run("parts", resume=True)
    assert [(step, table["data"][0][0]) for step, table in whole.tables] == [(3, 1), (6, 5), (9, 9)]
    assert after.tables[0] == whole.tables[1] and after.tables == whole.tables[1:]
    assert before.tables[0] == whole.tables[0]
    assert after.axis == [6, 6, 9, 9, 9]


@pytest.mark.slow
def test_two_processes_are_one_run_with_the_rows_of_both(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(WORKER)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **homes(tmp_path)}
    done = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = only_run(tmp_path)
    seen = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [facts["world_size"] for facts in seen] == [2, 2]
    assert [facts["has_run"] for facts in seen] == [True, False]
    assert run.axis == [1, 1, 2, 2, 3, 3, 3]  # the last is the summary, with nothing new to show
    assert [step for step, _ in run.tables] == [1, 2, 3]
    for step, table in run.tables:
        # 2 prompts x 4 completions, half of them drawn by each process
        rows = [row[table["columns"].index("completion")] for row in table["data"]]
        assert len(rows) == 8 and rows == [c for facts in seen for c in facts["completions"][step - 1]]
        assert len({row[1] for row in table["data"]}) == 2
    for facts in seen:
        assert [e["reward"] for e in facts["logs"]] == [row["train/reward"] for row in run.figures[:3]]
