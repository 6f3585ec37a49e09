#!/usr/bin/env python3
"""Holds the planned step time against measured steps, for shapes that the costs were not measured at.

In rounds, measures costs (qeffect plan --measure-costs; as many processes at a time as the shape has ranks, of which the
slowest counts, as it does in a pipeline), runs complete steps of the shape (qeffect bench) and measures costs again: a
machine whose speed drifts does so for the prediction and the measurement alike. Prints the median over the rounds of
predicted / measured; exit 1 when one is off by more than the tolerance.

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
# A prediction takes a message to be on its way while its sender computes. Open MPI sends large ones only while the
# sender polls, which a rank does between calls: let it send boundary tensors at once.
MPIRUN = "mpirun --oversubscribe --mca btl_vader_eager_limit 1048576 --mca btl_vader_max_send_size 2097152"


def run(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}\nexit {done.returncode}: {done.stderr}{done.stdout}")
    return done.stdout


def slowest(values):
    """The largest number, part by part of nested objects of numbers; all else from the first."""
    first = values[0]
    if isinstance(first, dict):
        return {key: slowest([v[key] for v in values]) for key in first}
    return max(values) if isinstance(first, float) else first


def measure_costs(plan, folder, ranks):
    paths = [folder / f"costs{r}.json" for r in range(ranks)]
    started = [subprocess.Popen([*map(str, plan), "--measure-costs", str(p)], stdout=subprocess.DEVNULL) for p in paths]
    if any([p.wait() != 0 for p in started]):
        sys.exit("qeffect plan --measure-costs failed")
    merged = folder / "costs.json"
    merged.write_text(json.dumps(slowest([json.loads(p.read_text()) for p in paths])))
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
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=8, help="of each shape in each round")
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--mpirun", default=MPIRUN)
    options = parser.parse_args()

    base = ["--config", options.config, *(part for o in options.overrides for part in ("--set", o))]
    plan = [options.qeffect, "plan", *base]
    micro = json.loads(run([*plan, "--json"]))["config"]["training"]["micro_batch_size"]
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for shape in SHAPES:
            there = settings(shape, micro)
            ranks = shape["pipeline.pipeline_model_parallel_size"]

            def predict():
                costs = measure_costs(plan, folder, ranks)
                return json.loads(run([*plan, *there, "--json", "--costs", costs]))["prediction"]["step"]

            rounds = []
            for _ in range(options.rounds):
                before = predict()
                run([*options.mpirun.split(), "-n", ranks, options.qeffect, "bench", *base, *there, "--steps",
                     options.steps, "--output", folder / "bench.json"])
                measured = json.loads((folder / "bench.json").read_text())["steps"]["median_ms"]
                rounds.append(((before + predict()) / 2, measured))
            off = statistics.median(predicted / measured for predicted, measured in rounds) - 1
            worst = max(worst, abs(off))
            print(f"{shape}: predicted / measured ms " + ", ".join(f"{p:.1f} / {m:.1f}" for p, m in rounds) +
                  f"; median {off:+.1%}", flush=True)
    return int(worst > options.tolerance)


if __name__ == "__main__":
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    sys.exit(main())
