"""One process of the tracking test: trains a tiny model that reports to W&B, and writes down what it saw itself.

Run by ``tests/properties/test_tracking.py`` under torchrun, as ``tracking_worker.py FOLDER``. Writes FOLDER/rank*.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from datasets import Dataset

from grpo_trainer import GRPOConfig, GRPOTrainer
from tests.helpers import tiny_llama, tiny_tokenizer


def main(out: Path) -> None:
    own: list[list[str]] = []

    def length(completions, **kwargs):
        own.append(list(completions))
        return [float(len(c)) for c in completions]

    config = GRPOConfig(
        str(out / "run"),
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        max_steps=3,
        logging_steps=1,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        report_to="wandb",
        log_completions=True,
        ddp_find_unused_parameters=False,
    )
    data = Dataset.from_list([{"prompt": text} for text in ("one", "two", "three", "four")])
    trainer = GRPOTrainer(tiny_llama(), length, config, data, processing_class=tiny_tokenizer())
    trainer.train()

    import wandb

    facts = {
        "world_size": config.world_size,
        "has_run": wandb.run is not None,
        "completions": own,
        "logs": [entry for entry in trainer.state.log_history if "loss" in entry],
    }
    (out / f"rank{config.process_index}.json").write_text(json.dumps(facts))
    wandb.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
