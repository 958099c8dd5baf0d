"""This project against TRL on the same work: ``bench.py [--workload NAME,…] [--what WHAT,…] [--dtype TYPE,…]``.

Each measurement is a process of its own; the two sides take turns, so that a slow minute of the machine meets both. Of
each process the first step is left out, of what remains the median is taken, and of the processes the median again.
Prints a row per result and writes benchmarks/results/latest.json, where rows that were not measured this time stay.

- ``update`` (and ``memory``): from fixed completions to the moment where the optimizer is about to move.
- ``step`` (and ``step memory``): a whole optimizer step with drawn completions, rewards and optimizer included.
- ``generation``: tokens per second while those completions are drawn; the same processes measure it and ``step``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import RESULTS, run, write_json

LATEST = RESULTS / "latest.json"
NAMES = ("sums", "gsm8k", "8shot", "half_dead", "lora")
DRAWN = ("sums", "gsm8k", "8shot")
WHATS = ("update", "generation", "step")
DTYPES = ("bf16", "fp32")
STEPS = {"update": 4, "step": 3}


def gradient_error(folder: Path) -> float | None:
    """Relative difference of the first gradients of the two sides."""
    import torch

    files = [folder / side / "gradient.pt" for side in ("ours", "trl")]
    if not all(f.exists() for f in files):
        return None
    ours, trl = map(torch.load, files)
    return ((ours - trl).norm() / trl.norm()).item()


def compare(workload: str, dtype: str, kind: str, repeats: int, model: str | None) -> list[dict[str, Any]]:
    """The rows of one comparison: of ``update``, or of ``step`` with its generation."""
    seconds: dict[str, list[float]] = {"trl": [], "ours": []}
    peak: dict[str, list[float]] = {"trl": [], "ours": []}
    speed: dict[str, list[float]] = {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(repeats):
            for side in ("trl", "ours") if turn % 2 == 0 else ("ours", "trl"):
                result = run("worker.py", [side, workload, dtype, kind, STEPS[kind]], Path(scratch) / side, model)
                seconds[side].append(statistics.median(result["seconds"][1:]))
                peak[side].append(result["peak_bytes"])
                drawn = result["generation"]
                rates = [n / s for n, s in zip(drawn["tokens"], drawn["seconds"], strict=True)]
                if kind == "step":
                    speed[side].append(statistics.median(rates[1:]))
        error = gradient_error(Path(scratch))
    rows = [row(workload, dtype, kind, seconds, error)]
    if kind == "update":
        rows.append(row(workload, dtype, "memory", peak, None))
    else:
        rows.append(row(workload, dtype, "generation", speed, None, more_is_better=True))
        rows.append(row(workload, dtype, "step memory", peak, None))
    return rows


def row(
    workload: str,
    dtype: str,
    what: str,
    values: dict[str, list[float]],
    error: float | None,
    more_is_better: bool = False,
) -> dict[str, Any]:
    """One row of the result file; ratio > 1 where this project is better."""
    trl, ours = statistics.median(values["trl"]), statistics.median(values["ours"])
    ratio = ours / trl if more_is_better else trl / ours
    names = {"workload": workload, "dtype": dtype, "what": what}
    return {**names, "trl": trl, "ours": ours, "ratio": ratio, "gradient_error": error, "runs": values}


def chosen(text: str | None, legal: Sequence[str], what: str, default: Sequence[str] | None = None) -> Sequence[str]:
    """The names in a text with commas; the default, or all legal ones, without a text."""
    if not text:
        return legal if default is None else default
    names = text.split(",")
    if unknown := [name for name in names if name not in legal]:
        raise SystemExit(f"unknown {what} {', '.join(unknown)}; legal: {', '.join(legal)}")
    return names


def comparisons(asked: argparse.Namespace) -> list[tuple[str, str, str]]:
    """(workload, dtype, kind) of everything to be measured: generation and step are one measurement."""
    workloads, whats = chosen(asked.workload, NAMES, "workload"), chosen(asked.what, WHATS, "what")
    kinds = list(dict.fromkeys("update" if what == "update" else "step" for what in whats))
    out = []
    for kind in kinds:
        for workload in workloads:
            if kind == "step" and workload not in DRAWN:
                if asked.workload:
                    print(f"{workload}: only its update is measured")
                continue
            default = DTYPES if kind == "update" else DTYPES[:1]
            out += [(workload, dtype, kind) for dtype in chosen(asked.dtype, DTYPES, "dtype", default)]
    return out


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", help=f"of {','.join(NAMES)}; all of them by default")
    parser.add_argument("--what", help=f"of {','.join(WHATS)}; all of them by default")
    parser.add_argument("--dtype", help="of bf16,fp32; by default both for update, bf16 for the others")
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--model", help="another model than SmolLM2-135M-Instruct: a name or a folder")
    parser.add_argument("--results", type=Path, default=LATEST, help="the file that rows are written to")
    asked = parser.parse_args()
    known = json.loads(asked.results.read_text()) if asked.results.exists() else []
    for workload, dtype, kind in comparisons(asked):
        start = time.perf_counter()
        rows = compare(workload, dtype, kind, asked.repeats, asked.model)
        keys = {(r["workload"], r["dtype"], r["what"]) for r in rows}
        known = [r for r in known if (r["workload"], r["dtype"], r["what"]) not in keys] + rows
        write_json(asked.results, known)
        for r in rows:
            error = "" if r["gradient_error"] is None else f"  gradient difference {r['gradient_error']:.1e}"
            print(
                f"{workload:10} {dtype} {r['what']:12} trl {r['trl']:<12.4g} ours {r['ours']:<12.4g} "
                f"ratio {r['ratio']:.2f}{error}",
                flush=True,
            )
        print(f"  ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
