"""Runs a tiny training that can be killed anywhere, for ``tests/properties/test_resume.py``.

The script imports everything once and then reads jobs, one JSON object a line. Each is run in forked processes, one
per rank, so that a run costs a second and its death costs nothing else. For every job it answers with a line that
holds the exit codes (-9: killed), in the file descriptor that its argument names: what is imported may print.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers.modeling_utils
from datasets import Dataset, IterableDataset
from peft import LoraConfig

import grpo_trainer.checkpoint
from grpo_trainer import GRPOConfig, GRPOTrainer
from grpo_trainer.cli.interrupt import train_until_stopped
from grpo_trainer.generation.engines import AutoGenerator
from tests.helpers import tiny_llama, tiny_tokenizer

COMMON: dict[str, Any] = dict(
    bf16=False,
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=6,
    learning_rate=1e-2,
    max_steps=9,
    save_strategy="steps",
    save_steps=2,  # not where the logs are
    logging_steps=3,
    temperature=1.3,
    gradient_checkpointing=False,
    log_completions=True,
    num_completions_to_print=1,
)


class KillSwitch:
    """Counts events of a run and kills the process at one of them; half a file is written if the event is a file."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count, self.saves = at, 0, []

    def event(self, half_written: Any = None) -> None:
        self.count += 1
        if half_written is not None:
            self.saves.append(self.count)
        if self.count == self.at:
            if half_written is not None:
                Path(half_written).write_bytes(b"PK\x03\x04half of a file")
            os.kill(os.getpid(), signal.SIGKILL)

    def wrap(self, owner: Any, name: str, path_argument: int | None = None) -> None:
        inner = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            target = args[path_argument] if path_argument is not None else None
            in_memory = hasattr(target, "write")  # a tensor on its way to another process is no file of a checkpoint
            self.event(None if in_memory else target)
            return inner(*args, **kwargs)

        setattr(owner, name, wrapped)


def rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": chr(ord("A") + i) * (1 + i % 3)} for i in range(count)]


def stream_rows(count: int):
    yield from rows(count)


def run(job: dict[str, Any], rank: int) -> None:
    out = Path(job["out"])
    switch = KillSwitch(job["kill"] if rank == job.get("kill_rank", 0) else None)
    # what may be half-way done when the process dies
    switch.wrap(torch, "save", 1)
    switch.wrap(safetensors.torch, "save_file", 1)
    switch.wrap(transformers.modeling_utils, "safe_save_file", 1)
    for owner, name in [(grpo_trainer.checkpoint.os, "rename"), (AutoGenerator, "generate")]:
        switch.wrap(owner, name)

    def reward(prompts, completions, completion_ids, trainer_state, **kwargs):
        switch.event()
        if trainer_state.global_step == job.get("told_in_step"):
            job["told_in_step"] = None  # once; an evaluation scores too
            told(job["signal"], rank, job["world_size"])
        with open(out / f"record{rank}.jsonl", "a") as record:  # at once, as what is only in memory dies with the run
            print(json.dumps([trainer_state.global_step, prompts, completion_ids]), file=record)
        noise = random.random() + torch.rand(()).item()  # global random states are part of the run
        noise = 1.0 if job.get("plain") else noise
        values = [
            len(set(ids)) / 3 + (ids[0] % 7 if ids else 0) + noise * (i % 4) for i, ids in enumerate(completion_ids)
        ]
        return [0.0 if p[0] in job.get("silent", "") else v for p, v in zip(prompts, values, strict=True)]

    config = GRPOConfig(str(out / "run"), **{**COMMON, **job["settings"]})
    data: Any = Dataset.from_list(rows(7))
    if job.get("stream"):
        shards = {"gen_kwargs": {"count": 7}}
        data = IterableDataset.from_generator(stream_rows, **shards)
    peft = LoraConfig(r=4, lora_dropout=0.2, target_modules="all-linear") if job.get("lora") else None
    model = tiny_llama(num_hidden_layers=1)
    held_out = Dataset.from_list(rows(2)) if job.get("evaluates") else None
    trainer = GRPOTrainer(model, reward, config, data, held_out, processing_class=tiny_tokenizer(), peft_config=peft)
    switch.wrap(trainer, "training_step")
    checkpoint = True if job["resume"] else None
    if job.get("signal") == "SIGINT":  # as the command line trains
        code = train_until_stopped(trainer, checkpoint, contextlib.nullcontext(), print)
        if code:
            raise SystemExit(code)
    else:
        trainer.train(resume_from_checkpoint=checkpoint)
    assert config.world_size == job["world_size"]
    torch.save(
        {
            "parameters": dict(trainer.model.state_dict()),
            "optimizer": trainer.optimizer.state_dict()["state"],
            "logs": [{k: v for k, v in entry.items() if is_exact(k)} for entry in trainer.state.log_history],
            "rng": (random.getstate(), torch.get_rng_state()),
            "events": switch.count,
            "saves": switch.saves,
        },
        out / f"end{rank}.pt",
    )


def told(name: str, rank: int, world_size: int) -> None:
    """SIGTERM from a careless scheduler, to the first process; Ctrl-C from the terminal, and from a launcher again."""
    number = getattr(signal, name)
    for _ in range(rank == 0 if number == signal.SIGTERM else min(world_size, 2)):
        os.kill(os.getpid(), number)


def is_exact(name: str) -> bool:
    """Whether a logged figure is no measure of time."""
    return not any(word in name for word in ("time", "second", "runtime"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def fork(job: dict[str, Any], rank: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        log = os.open(f"{job['out']}/log{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1), os.dup2(log, 2)
        if job["world_size"] > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job["world_size"]),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
        run(job, rank)
        code = 0
    except SystemExit as leave:
        code = leave.code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)


def answer(job: dict[str, Any]) -> list[int]:
    """Runs a job; once one of its processes was killed, so are the others, as a launcher does."""
    port = free_port()
    children = [fork(job, rank, port) for rank in range(job["world_size"])]
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        child, status = os.wait()
        codes[child] = os.waitstatus_to_exitcode(status)
        if codes[child]:
            for other in set(children) - set(codes):
                os.kill(other, signal.SIGKILL) if codes[child] < 0 else None
    return [codes[child] for child in children]


if __name__ == "__main__":
    torch.set_num_threads(1)
    with os.fdopen(int(sys.argv[1]), "w") as answers:
        for line in sys.stdin:
            print(json.dumps(answer(json.loads(line))), file=answers, flush=True)
