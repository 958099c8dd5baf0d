"""The commands with the real trainer and a tiny model, in files and processes as a user has them."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from grpo_trainer.cli import main
from grpo_trainer.cli.recipe import load_recipe
from grpo_trainer.cli.shipped import find_recipe, launcher_files, recipe_names
from grpo_trainer.rewards import sandbox

SUMS = "quickstart/smollm2-135m-sums"


@pytest.fixture
def tiny(tmp_path, tiny_llama, tiny_tokenizer) -> str:
    folder = tmp_path / "tiny"
    tiny_llama(max_position_embeddings=1024).save_pretrained(folder)
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


# what stands in for the data sets of the hub
STAND_INS = {
    "openai/gsm8k": [{"question": f"What is {i} + {i}?", "answer": f"Twice. #### {2 * i}"} for i in range(64)],
    "DigitalLearningGmbH/MATH-lighteval": [
        {"problem": f"What is {i} + {i}?", "solution": f"Twice: $\\boxed{{{2 * i}}}$."} for i in range(64)
    ],
}


@pytest.mark.parametrize("name", recipe_names())
def test_every_shipped_recipe_is_told_in_a_dry_run(name, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = load_recipe(name)
    if any("code" in entry.name for entry in wanted.arguments.rewards()) and not sandbox.sandbox_is_available():
        pytest.skip("its rewards run programs, and there is no sandbox here: bubblewrap")
    words = ["--model_name_or_path", tiny, "--dry_run"]
    if wanted.config().max_completion_length > 128:
        words += ["--max_completion_length", "64"]  # the tiny model's context is 1024 tokens
    if not wanted.arguments.dataset_name.startswith("builtin:"):
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, STAND_INS[wanted.arguments.dataset_name])))
        words += ["--dataset_name", "rows.jsonl", "--dataset_test_split", "train[:2]"]
    before = sorted(tmp_path.rglob("*"))
    assert main(["train", name, *words]) == 0
    shown = capsys.readouterr().out
    config = wanted.config()
    assert f"optimizer steps  {config.max_steps} in all" in shown
    assert f"x {config.num_generations} completions" in shown
    assert re.search(r"What is |Using the numbers |def f\(a\)", shown)
    begins = "Assistant:" if wanted.arguments.chat_template else "<|im_start|>assistant"
    assert ("def f(a): return" if wanted.arguments.dataset_name == "builtin:functions" else begins) in shown
    assert "".join((wanted.arguments.system_prompt or "").split()) in "".join(shown.split())
    assert shown.rstrip().endswith("dry run: nothing was trained, nothing was written")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_dry_run_finds_what_the_run_would_stumble_over(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    for words, message in [
        (["--num_generations", "7"], "num_generations=7"),
        (["--reward_funcs", "math:gcd"], "cannot be called"),
        (["--max_completion_length", "4000"], "leaves no room for a prompt"),
        (["--resume_from_checkpoint", "nowhere"], "there is no such folder"),
        (["--max_prompt_length", "5", "--overlong_prompts", "error"], "more than max_prompt_length=5"),
    ]:
        assert main(["train", SUMS, *settings(tiny, out), *words, "--dry_run"]) == 2
        assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_dry_run_makes_no_repository_on_the_hub(tiny, tmp_path, capsys):
    words = ["--push_to_hub", "true", "--hub_model_id", "a/b", "--dry_run"]  # here the hub cannot be reached
    assert main(["train", SUMS, *settings(tiny, tmp_path / "out"), *words]) == 0


def test_the_file_that_a_run_leaves_repeats_it(tiny, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert main(["train", SUMS, *settings(tiny, first), "--learning_rate", "1e-3", "--save_strategy", "steps"]) == 0
    assert main(["train", str(first / "run.yaml"), "--output_dir", str(second)]) == 0
    then, now = (
        json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())["log_history"] for out in (first, second)
    )
    for entry, again in zip(then, now, strict=True):
        assert {k: v for k, v in entry.items() if k in ("reward", "loss", "grad_norm", "entropy")} == {
            k: v for k, v in again.items() if k in ("reward", "loss", "grad_norm", "entropy")
        }
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()


def test_a_stream_with_a_function_and_a_system_prompt_is_trained_on(tiny, tmp_path, recipe_file, capsys):
    rows = STAND_INS["openai/gsm8k"]
    for i in range(2):
        (tmp_path / f"rows{i}.jsonl").write_text("\n".join(map(json.dumps, rows[4 * i : 4 * i + 4])))
    recipe = recipe_file(
        f"dataset_name: {tmp_path}/rows*.jsonl\ndataset_streaming: true\ndataset_prompt_column: question\n"
        "dataset_map_fn: grpo_trainer.tasks.gsm8k_answer\nsystem_prompt: Be brief.\nreward_funcs: last_integer\n"
        "num_generations: 4\nlogging_steps: 1\nreport_to: none\nsave_strategy: no\n"
    )
    assert main(["train", recipe, *settings(tiny, tmp_path / "out", steps=1)]) == 0
    shown = capsys.readouterr().out
    assert f"{tiny} on a stream of {tmp_path}/rows*.jsonl, 1 process" in shown
    assert "Be brief." in shown and "step 1/1" in shown


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


def launch(*words: str, file: str | None = None, expect: int = 0) -> subprocess.CompletedProcess[str]:
    """``accelerate launch`` with a file of recipes/accelerate, or without one."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if file is not None:
        (path,) = [str(path) for path in launcher_files() if path.name == file]
        command += ["--config_file", path]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=600, env=environment, check=False)
    assert done.returncode == expect, done.stdout + done.stderr
    return done


@pytest.mark.slow
@pytest.mark.parametrize("file", ["cpu.yaml", "ddp.yaml"])
def test_accelerate_launches_two_processes_of_which_one_speaks(tiny, tmp_path, file):
    out = tmp_path / "out"
    recipe = str(find_recipe(SUMS))
    words = ["-m", "grpo_trainer", "train", recipe, *settings(tiny, out), "--learning_rate", "2e-6", "--use_cpu"]
    done = launch(*words, file=file)
    assert done.stdout.count("2 processes") == 1
    assert done.stdout.count("step 2/2") == 1
    assert done.stdout.count("the first prompt, as the model reads it") == 1
    loads(out)
    saved = load_recipe(str(out / "run.yaml"))
    assert saved.arguments.num_processes == 2 and saved.settings["learning_rate"] == 2e-6
    # what was run by two is not repeated by one, unless that is asked for
    assert main(["train", str(out / "run.yaml"), "--dry_run"]) == 2
    assert main(["train", str(out / "run.yaml"), "--dry_run", "--num_processes", "1"]) == 0


@pytest.mark.slow
def test_the_plan_of_two_processes_and_the_number_on_the_command_line(tiny, tmp_path):
    words = ["-m", "grpo_trainer", "train", SUMS, *settings(tiny, tmp_path / "out"), "--use_cpu", "--dry_run"]
    two = launch(*words, file="cpu.yaml").stdout
    assert two.count("processes        2") == 1
    assert "4 prompts x 8 completions = 32, on each process 1 micro-batches of 16" in two
    assert "processes        1" in launch("--num_processes", "1", *words, file="cpu.yaml").stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_launcher_that_starts_one_process_where_two_were_asked_for_is_told(tiny, tmp_path):
    words = ["--cpu", "--num_processes", "2", "-m", "grpo_trainer", "train", SUMS]
    done = launch(*words, *settings(tiny, tmp_path / "out"), "--dry_run")
    assert "note: accelerate launch was asked for several processes and started one" in done.stdout
    assert "processes        1" in done.stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGTERM to send to another process")
def test_a_terminated_run_goes_on_by_the_command_that_it_prints(tiny, tmp_path):
    out, log = tmp_path / "out", tmp_path / "log"
    program = [sys.executable, "-m", "grpo_trainer"]
    with log.open("w") as file:
        command = [*program, "train", SUMS, *settings(tiny, out, steps=60)]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 240
        while "step 5/60" not in log.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=120) == 143, log.read_text()
    text = log.read_text()
    stopped = int(re.search(r"Stopped after step (\d+) of 60", text)[1])
    assert (out / f"checkpoint-{stopped}").is_dir() and "Traceback" not in text
    go_on = re.search(r"Go on with: grpo-trainer (.*)", text)[1]
    done = subprocess.run([*program, *shlex.split(go_on)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 60/60" in done.stdout
    loads(out)
