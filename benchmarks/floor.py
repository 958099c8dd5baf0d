"""The share of an update's time that its multiplications need at least: ``floor.py [WORKLOAD,…]``.

The floor is the multiply-adds of the packed stream (forward, and backward where there is a gradient to pass on), each
counted as two operations, over the speed that this machine reaches in a large matrix product of the same type. The
seconds are those of benchmarks/results/latest.json, or those given with ``--seconds``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from bench import LATEST
from transformers import AutoConfig, AutoTokenizer
from workloads import WORKLOADS, Workload, completion, model_source, rows

SIDE = 2048


def speed(dtype: torch.dtype) -> float:
    """Operations per second in a product of two square matrices."""
    a, b = (torch.randn(SIDE, SIDE, dtype=dtype) for _ in range(2))
    times = []
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * SIDE**3 / statistics.median(times[2:])


def operations(workload: Workload, tokenizer: Any, config: Any) -> dict[str, float]:
    """Operations of one update over the rows that carry a gradient, by where they arise."""
    from grpo_trainer.policy.packing import pack
    from grpo_trainer.types import RolloutBatch

    live = [i for i in range(workload.prompts) if i % workload.prompts >= workload.silent * workload.prompts]
    given = rows(workload, workload.prompts)
    prompts = [
        tokenizer.apply_chat_template(given[i]["prompt"], add_generation_prompt=True, return_dict=False) for i in live
    ]
    answers = [completion(workload, tokenizer, p, i) for p in prompts for i in range(workload.generations)]
    width = max(map(len, answers))
    stream = pack(
        RolloutBatch(
            prompt_ids=tuple(map(torch.tensor, prompts)),
            prompt_of_row=tuple(p for p in range(len(prompts)) for _ in range(workload.generations)),
            lengths=tuple(map(len, answers)),
            completion_ids=torch.tensor([a + [0] * (width - len(a)) for a in answers]),
            mask=torch.ones(len(answers), width, dtype=torch.bool),
            advantages=torch.ones(len(answers)),
        )
    )
    tokens, scored = stream.input_ids.shape[1], len(stream.predictors)
    size, head = config.hidden_size, config.hidden_size // config.num_attention_heads
    heads, shared = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = size * (2 * heads + 2 * shared) + 3 * size * config.intermediate_size
    pairs = sum(s.tokens * s.depth + s.tokens * (s.tokens + 1) // 2 for s in stream.segments)
    passes = 3  # forward; backward for what is multiplied, and for what it is multiplied with
    return {
        "layers": 2.0 * passes * tokens * layer * config.num_hidden_layers,
        "attention": 2.0 * passes * 2 * pairs * heads * config.num_hidden_layers,
        "head": 2.0 * passes * scored * size * config.vocab_size,
    }


def main() -> None:
    """Prints a line per workload and type."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="?", default="gsm8k")
    parser.add_argument("--seconds", type=float, help="of one update, in place of the recorded ones")
    asked = parser.parse_args()
    known = json.loads(LATEST.read_text(encoding="utf-8"))
    source = model_source()
    tokenizer, config = AutoTokenizer.from_pretrained(source), AutoConfig.from_pretrained(source)
    for name in asked.workloads.split(","):
        work = operations(WORKLOADS[name], tokenizer, config)
        for dtype, kind in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
            recorded = [r["ours"] for r in known if (r["workload"], r["dtype"], r["what"]) == (name, dtype, "update")]
            seconds = asked.seconds or (recorded[0] if recorded else None)
            rate = speed(kind)
            floor = sum(work.values()) / rate
            share = "" if seconds is None else f", {floor / seconds:.0%} of {seconds:.2f} s"
            parts = ", ".join(f"{part} {amount / 1e9:.0f}" for part, amount in work.items())
            print(f"{name} {dtype}: {parts} GFLOP at {rate / 1e9:.0f} GFLOP/s take {floor:.2f} s{share}")


if __name__ == "__main__":
    main()
