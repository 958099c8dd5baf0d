"""One process of two whose rewards come to grief, for ``tests/test_trainer_rewards.py``: ``reward_worker.py FOLDER``.

Writes FOLDER/rank*.json: for each case how the run ended, after how many seconds, and how many workers are left.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import psutil
from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from tests.helpers import tiny_llama, tiny_tokenizer

RANK = int(os.environ.get("RANK", "0"))
CASES = {
    "raises": {"isolation": "process", "time_limit": 60},
    "inline": {},
    "segfault": {"isolation": "process", "time_limit": 60},
    "native loop": {"isolation": "process", "time_limit": 1, "on_timeout": "raise"},
    "counted": {"isolation": "process", "time_limit": 60, "on_error": "none"},
    "split": {"group": True},
}


def make_bad(case, fails):
    import ctypes
    import re

    def bad(completions, **kwargs):
        if fails and case == "segfault":
            ctypes.string_at(0)
        if fails and case == "native loop":
            re.match(r"(a+)+$", "a" * 60 + "b")
        if fails:
            raise KeyError("nothing here")
        return [float(len(c)) for c in completions]

    return bad


def run(out: str, case: str, options: dict) -> dict:
    config = GRPOConfig(
        out,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        max_steps=1,
        disable_tqdm=True,
        num_generations=8 if case == "split" else 4,
        max_completion_length=4,
        per_device_train_batch_size=4,
        ddp_find_unused_parameters=False,
        reward_options={"bad": options},
    )
    rows = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three", "four")])
    found = {"error": None}
    try:
        trainer = GRPOTrainer(tiny_llama(), make_bad(case, RANK == 1), config, rows, processing_class=tiny_tokenizer())
        trainer.train()
        found["log"] = next(e for e in trainer.state.log_history if "loss" in e)
    except Exception as error:
        found["error"] = str(error)
    return {**found, "workers": len(psutil.Process().children(recursive=True))}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    facts = {case: run(str(folder / case), case, options) for case, options in CASES.items()}
    facts["world_size"] = int(os.environ["WORLD_SIZE"])
    (folder / f"rank{RANK}.json").write_text(json.dumps(facts))
