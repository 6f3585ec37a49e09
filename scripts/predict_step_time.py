#!/usr/bin/env python3
"""Holds the planned step time against measured steps, for shapes that the costs were not measured at.

Measures costs once (qeffect plan --measure-costs; as many at a time as the shapes have ranks, so that they share the
machine as ranks do), then runs qeffect bench and qeffect plan --costs for each shape. Exit 1 when a prediction is off by
more than the tolerance. Wants a quiet machine.

usage: predict_step_time.py --qeffect build/cpu/qeffect [--config configs/quickstart.json] [--set key=value ...]
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

# Neither depth, nor ranks, nor schedule of the measurement: it has three layers on one rank.
SHAPES = [
    {"model.num_layers": 4, "pipeline.pipeline_model_parallel_size": 2, "pipeline.schedule": "zbv", "microbatches": 8},
    {"model.num_layers": 7, "pipeline.pipeline_model_parallel_size": 2, "pipeline.schedule": "1f1b", "microbatches": 6},
]


def run(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexit {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


def mean(values):
    """Of numbers, or part by part of nested objects of numbers; all else from the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: mean([v[key] for v in values]) for key in first}
    return statistics.fmean(values) if isinstance(first, float) else first


def measure_costs(command, folder, ranks):
    paths = [folder / f"costs{r}.json" for r in range(ranks)]
    started = [subprocess.Popen([*map(str, command), "--measure-costs", str(p)], stdout=subprocess.DEVNULL) for p in paths]
    if any(p.wait() != 0 for p in started):
        sys.exit("qeffect plan --measure-costs failed")
    merged = folder / "costs.json"
    merged.write_text(json.dumps(mean([json.loads(p.read_text()) for p in paths])))
    return merged


def settings(shape, micro_batch_size):
    keys = {k: v for k, v in shape.items() if k != "microbatches"}
    keys["training.global_batch_size"] = shape["microbatches"] * micro_batch_size
    return [part for k, v in keys.items() for part in ("--set", f"{k}={v}")]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qeffect", required=True, type=Path)
    parser.add_argument("--config", default="configs/quickstart.json")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--mpirun", default="mpirun --oversubscribe")
    options = parser.parse_args()

    base = ["--config", options.config, *(part for o in options.overrides for part in ("--set", o))]
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ranks = max(s["pipeline.pipeline_model_parallel_size"] for s in SHAPES)
        costs = measure_costs([options.qeffect, "plan", *base], folder, ranks)
        for shape in SHAPES:
            plan = [options.qeffect, "plan", *base, "--json"]
            micro = json.loads(run(plan))["config"]["training"]["micro_batch_size"]
            there = settings(shape, micro)
            predicted = json.loads(run([*plan, *there, "--costs", costs]))["prediction"]["step"]
            ranks = shape["pipeline.pipeline_model_parallel_size"]
            run([*options.mpirun.split(), "-n", ranks, options.qeffect, "bench", *base, *there, "--steps", options.steps,
                 "--output", folder / "bench.json"])
            measured = json.loads((folder / "bench.json").read_text())["steps"]["median_ms"]
            off = predicted / measured - 1
            worst = max(worst, abs(off))
            print(f"{shape}: predicted {predicted:.2f} ms, measured {measured:.2f} ms, {off:+.1%}", flush=True)
    return int(worst > options.tolerance)


if __name__ == "__main__":
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    sys.exit(main())
