"""This project against TRL on the same work: ``bench.py [--workload NAME] [--what WHAT] [--dtype TYPE] [--repeats N]``.

Each measurement is a process of its own; the two sides take turns, so that a slow minute of the machine meets both. Of
each process the first step is left out, of what remains the median is taken, and of the processes the median again.
Prints a row per result and writes benchmarks/results/latest.json, where rows that were not measured this time stay.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "latest.json"
NAMES = ("sums", "gsm8k", "8shot", "half_dead", "lora")
DRAWN = ("sums", "gsm8k", "8shot")
STEPS = {"update": 4, "step": 3}
# glibc hands large blocks back to the kernel after every free, and page faults then dominate: both sides are spared it
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "8589934592",
    "MALLOC_TRIM_THRESHOLD_": "17179869184",
    "MALLOC_TOP_PAD_": "268435456",
}


def run(side: str, workload: str, dtype: str, what: str, folder: Path) -> dict[str, Any]:
    """One process; what it measured."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [str(HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, **MALLOC, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, str(HERE / "worker.py"), side, workload, dtype, what, str(STEPS[what]), str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} failed on {workload} {dtype} {what}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return json.loads((folder / "result.json").read_text())


def gradient_error(folder: Path) -> float | None:
    """Relative difference of the first gradients of the two sides."""
    import torch

    files = [folder / side / "gradient.pt" for side in ("ours", "trl")]
    if not all(f.exists() for f in files):
        return None
    ours, trl = map(torch.load, files)
    return ((ours - trl).norm() / trl.norm()).item()


def compare(workload: str, dtype: str, what: str, repeats: int) -> list[dict[str, Any]]:
    """The rows of one comparison."""
    seconds: dict[str, list[float]] = {"trl": [], "ours": []}
    peak: dict[str, list[float]] = {"trl": [], "ours": []}
    speed: dict[str, list[float]] = {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as scratch:
        for turn in range(repeats):
            for side in ("trl", "ours") if turn % 2 == 0 else ("ours", "trl"):
                result = run(side, workload, dtype, what, Path(scratch) / side)
                seconds[side].append(statistics.median(result["seconds"][1:]))
                peak[side].append(result["peak_bytes"])
                drawn = result["generation"]
                rates = [n / s for n, s in zip(drawn["tokens"], drawn["seconds"], strict=True)]
                speed[side].extend(rates[1:])
        error = gradient_error(Path(scratch))
    rows = [row(workload, dtype, what, seconds, error)]
    if what == "update":
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


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workload", choices=NAMES)
    parser.add_argument("--what", choices=("update", "step"))
    parser.add_argument("--dtype", choices=("bf16", "fp32"))
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    for what in [asked.what] if asked.what else ["update", "step"]:
        for workload in [asked.workload] if asked.workload else NAMES:
            if what == "step" and workload not in DRAWN:
                continue
            dtypes = [asked.dtype] if asked.dtype else ["bf16", "fp32"] if what == "update" else ["bf16"]
            for dtype in dtypes:
                start = time.perf_counter()
                rows = compare(workload, dtype, what, asked.repeats)
                keys = {(r["workload"], r["dtype"], r["what"]) for r in rows}
                known = [r for r in known if (r["workload"], r["dtype"], r["what"]) not in keys] + rows
                RESULTS.parent.mkdir(exist_ok=True)
                RESULTS.write_text(json.dumps(known, indent=1) + "\n")
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
