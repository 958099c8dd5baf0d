"""The commands with the real trainer and a tiny model, in files and processes as a user has them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from grpo_trainer.cli import main

SUMS = "quickstart/smollm2-135m-sums"


@pytest.fixture
def tiny(tmp_path, tiny_llama, tiny_tokenizer) -> str:
    folder = tmp_path / "tiny"
    tiny_llama(max_position_embeddings=512).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return str(folder)


def settings(tiny: str, out, steps: int = 2) -> list[str]:
    words = f"--model_name_or_path {tiny} --output_dir {out} --max_steps {steps} --per_device_train_batch_size 16"
    return [*words.split(), "--gradient_accumulation_steps", "1", "--max_completion_length", "6"]


def loads(folder) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)
    AutoModelForCausalLM.from_pretrained(folder)


def test_train_leaves_a_model_that_loads_and_its_completions(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    words = ["--log_completions", "--num_completions_to_print", "1", "--eval_strategy", "steps", "--eval_steps", "1"]
    assert main(["train", SUMS, *settings(tiny, out), *words]) == 0
    loads(out)
    tables = [pq.read_table(f) for f in sorted((out / "completions").iterdir())]
    assert [set(table["step"].to_pylist()) for table in tables] == [{1}, {2}]
    assert all(table.num_rows == 16 for table in tables)
    shown = capsys.readouterr().out
    assert re.search(r"step 2/2  reward 0\.\d{3}", shown) and "step 2: eval_reward 0." in shown


def test_what_only_the_trainer_can_refuse_is_one_short_message_too(tmp_path, capsys):
    assert main(["train", SUMS, "--model_name_or_path", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "nowhere" in error and error.startswith("error: ") and "Traceback" not in error


def test_quickstart_ends_with_its_four_results(tiny, tmp_path):
    out = tmp_path / "out"
    assert main(["quickstart", *settings(tiny, out), "--seed", "3"]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["seed"], summary["steps"], summary["reward_after"]["n"]) == (3, 2, 64)
    assert 0 < summary["generation_seconds"] + summary["update_seconds"] <= summary["train_seconds"]
    assert (out / "reward_curve.png").is_file()
    loads(out / "model")
    table = pq.read_table(out / "completions" / "completions_00001.parquet")
    assert table.column_names == [
        *("step", "prompt", "completion", "last_integer", "advantage", "finished", "length"),
    ]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send to another process")
def test_a_stopped_quickstart_goes_on_by_the_command_that_it_prints(tiny, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    environment = {key: value for key, value in os.environ.items() if key != "MAKELEVEL"}
    command = [sys.executable, "-m", "grpo_trainer", "quickstart", *settings(tiny, out, steps=40), "--seed", "1"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        deadline = time.monotonic() + 240
        while "step 4/40" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 130, log.read_text()
    text = log.read_text()
    stopped = int(re.search(r"Stopped after step (\d+) of 40", text)[1])
    assert 4 <= stopped < 40 and (out / f"checkpoint-{stopped}").is_dir()
    before = json.loads((out / "run.json").read_text())["before"]["reward"]

    go_on = re.search(r"Go on with: (.*)", text)[1]
    done = subprocess.run(go_on, shell=True, capture_output=True, text=True, env=environment, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["steps"] == 40 and list(summary["reward_before"].values()) == before
    assert len(list((out / "completions").iterdir())) == 40
    loads(out / "model")


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--load_in_4bit", "--use_bnb_nested_quant"], ["--load_in_8bit"]])
def test_an_adapter_is_trained_alone_or_on_a_quantised_model(tiny, tmp_path, words):
    pytest.importorskip("bitsandbytes")
    out = tmp_path / "out"
    adapter = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj"]
    assert main(["train", SUMS, *settings(tiny, out), *adapter, *words]) == 0
    saved = json.loads((out / "adapter_config.json").read_text())
    assert (saved["r"], saved["target_modules"]) == (4, ["q_proj"])
    assert not (out / "model.safetensors").exists()


@pytest.mark.slow
def test_accelerate_launches_two_processes_of_which_one_speaks(tiny, tmp_path):
    # this launcher's own --cpu would silently start a single process
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    plain = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command = [*launch, *plain, "-m", "grpo_trainer", "train", SUMS, *settings(tiny, tmp_path / "out"), "--use_cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("2 processes") == 1
    assert done.stdout.count("step 2/2") == 1
    loads(tmp_path / "out")
