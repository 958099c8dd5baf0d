"""Tokens per second against completions in flight: ``generation.py [--counts 8,16,…] [--engines group,…]``.

For each engine a process of its own draws completions of one prompt length, none of which ends early, a growing number
of them at once; of several calls the first is left out and the best is taken. Beside them stands the floor that memory
sets: each token of a row needs all weights and the row's keys and values to be read once, and the weights serve all
rows of a step. Writes benchmarks/results/generation.json and a picture; with ``--docs`` table and picture go into
docs/generation.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from processes import RESULTS, run, write_json
from report import BEGIN, DOCS, END, processor

COLOURS = {"group": "#4477aa", "generate": "#cc3311", "continuous_batching": "#ee7733"}
PROMPT, NEW, CALLS = 64, 64, 3


def floor(counts: list[int], dtype_bytes: int = 2) -> list[float]:
    """Tokens per second if a step took no longer than reading weights, keys and values from memory.

    Args:
        counts: rows in flight.
        dtype_bytes: of a weight, a key and a value.

    Returns:
        One figure per count.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from workloads import model_source

    device = "cuda" if torch.cuda.is_available() else "cpu"
    block = torch.ones(1 << 28, dtype=torch.float32, device=device)  # 1 GiB, larger than any cache
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        block.sum().item()
        seconds.append(time.perf_counter() - start)
    bandwidth = block.numel() * 4 / min(seconds)
    config = AutoConfig.from_pretrained(model_source())
    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).num_parameters() * dtype_bytes
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * head * dtype_bytes * (PROMPT + NEW / 2)
    return [bandwidth * n / (weights + n * row) for n in counts]


def worker(engine: str, counts: str, dtype: str, folder: str) -> None:
    """One engine: tokens per second for each number of completions.

    Args:
        engine: its name.
        counts: with commas.
        dtype: ``bf16`` for autocast over float32 weights, as in training, or ``fp32``.
        folder: where ``result.json`` goes.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from workloads import model_source

    from grpo_trainer.generation.engines import make_generator
    from grpo_trainer.types import SamplingParams

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # autocast does not reach continuous batching, which computes in the weights' own type
    own = engine == "continuous_batching" and dtype == "bf16"
    model = AutoModelForCausalLM.from_pretrained(model_source(), dtype=torch.bfloat16 if own else torch.float32)
    model = model.to(device)

    def lower() -> contextlib.AbstractContextManager:
        return torch.autocast(device.type, torch.bfloat16) if dtype == "bf16" else contextlib.nullcontext()

    generator = make_generator(engine, lambda: model, lower)
    sampling = SamplingParams(
        max_new_tokens=NEW, eos_token_ids=(model.config.vocab_size - 1,), pad_token_id=0, temperature=1.0
    )
    rates = []
    for count in map(int, counts.split(",")):
        groups = max(1, count // 8)
        draw = torch.Generator().manual_seed(0)
        prompts = torch.randint(10, model.config.vocab_size, (groups, PROMPT), generator=draw).tolist()
        best = 0.0
        for call in range(CALLS):
            start = time.perf_counter()
            drawn = generator.generate(prompts, [count // groups] * groups, sampling, seed=call)
            rate = sum(map(len, drawn.ids)) / (time.perf_counter() - start)
            best = max(best, rate if call else 0.0)
        rates.append(best)
    Path(folder, "result.json").write_text(json.dumps({"rates": rates}), encoding="utf-8")


def draw(path: Path, entry: dict[str, Any]) -> None:
    """Tokens per second over completions in flight, both logarithmic.

    Args:
        path: the PNG to write.
        entry: counts, the floor and each engine's figures.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(entry["counts"], entry["floor"], "--", color="#555555", label="if memory bandwidth was all")
    for engine, rates in entry["engines"].items():
        axes.plot(entry["counts"], rates, "o-", color=COLOURS.get(engine), markersize=4, label=engine)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlabel("completions in flight")
    axes.set_ylabel("tokens per second")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def table(entry: dict[str, Any]) -> str:
    """One line per engine, and one for the floor: tokens per second by completions in flight.

    Args:
        entry: counts, the floor and each engine's figures.

    Returns:
        Markdown.
    """
    rows = {**{f"`{engine}`": rates for engine, rates in entry["engines"].items()}, "memory bandwidth": entry["floor"]}
    head = ["completions in flight", *map(str, entry["counts"])]
    lines = [head, ["---"] * len(head), *([name, *(f"{rate:.0f}" for rate in rates)] for name, rates in rows.items())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def publish(entry: dict[str, Any], page: Path) -> None:
    """Puts table and picture into a page: in place of those of before, or as a new section at its end.

    Args:
        entry: as for ``table``.
        page: the Markdown file; the picture goes into ``images`` beside it.
    """
    draw(page.parent / "images" / "generation.png", entry)
    before, found, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    if not found:
        before = f"{before.rstrip()}\n\n## How fast\n\n"
    model = entry["model"] or "SmolLM2-135M-Instruct"
    text = (
        f"Tokens per second, {model}, {entry['dtype']}, {entry['prompt']} tokens of prompt and {entry['new']} of each "
        f"completion, groups of 8, the best of {CALLS - 1} calls; {date.today().isoformat()}, {processor()}. With bf16 "
        "the weights are float32 under autocast, as in training, but those of continuous batching, which has none, are "
        "bf16. Memory bandwidth: if a step took no longer than reading weights, keys and values.\n\n"
        f"{table(entry)}\n\n![tokens per second over completions in flight](images/generation.png)"
    )
    page.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2] or chr(10)}", encoding="utf-8")


def main() -> None:
    """Measures the engines that were asked for; those of before stay where the counts are the same."""
    from grpo_trainer.generation.base import ENGINES

    engines = ",".join(name for name in ENGINES if name != "auto")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--counts", default="8,16,32,64,128,256", help="completions in flight, multiples of 8")
    parser.add_argument("--engines", default=engines, help=f"of {engines}")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--model", help="another model than SmolLM2-135M-Instruct: a name or a folder")
    parser.add_argument("--results", type=Path, default=RESULTS / "generation.json", help="the file to write")
    parser.add_argument("--docs", action="store_true", help="put table and picture into docs/generation.md")
    asked = parser.parse_args()
    counts = [int(n) for n in asked.counts.split(",")]
    old = json.loads(asked.results.read_text(encoding="utf-8")) if asked.results.exists() else {}
    entry = {"dtype": asked.dtype, "model": asked.model, "prompt": PROMPT, "new": NEW, "counts": counts}
    known = old["engines"] if all(old.get(name) == value for name, value in entry.items()) else {}
    with tempfile.TemporaryDirectory() as scratch:
        for engine in asked.engines.split(","):
            words = ["--worker", engine, asked.counts, asked.dtype]
            known[engine] = run("generation.py", words, Path(scratch) / engine, asked.model)["rates"]
            pairs = zip(counts, known[engine], strict=True)
            print(f"{engine:20}", "  ".join(f"{n}: {rate:.0f}" for n, rate in pairs), "tokens/s", flush=True)
        limits = run("generation.py", ["--floor", asked.counts, asked.dtype], Path(scratch) / "floor", asked.model)
    print(f"{'memory bandwidth':20}", "  ".join(f"{n}: {r:.0f}" for n, r in zip(counts, limits["rates"], strict=True)))
    entry = {**entry, "floor": limits["rates"], "engines": known}
    write_json(asked.results, entry)
    draw(asked.results.with_suffix(".png"), entry)
    if asked.docs:
        publish(entry, DOCS / "generation.md")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(*sys.argv[2:])
    elif sys.argv[1:2] == ["--floor"]:
        limits = floor([int(n) for n in sys.argv[2].split(",")], 2 if sys.argv[3] == "bf16" else 4)
        Path(sys.argv[4], "result.json").write_text(json.dumps({"rates": limits}), encoding="utf-8")
    else:
        main()
