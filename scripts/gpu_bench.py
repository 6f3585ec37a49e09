#!/usr/bin/env python3
"""Times complete optimizer steps on the GPUs of this machine, one cell after another, each in fresh processes.

A cell is a shape, a number of GPUs, a transport and a variant of the step; its id is the four, "h4096/2/ipc/w_group".
Every cell is one line of JSON in the output file: the command, the slowest rank's median of each process, raw times by
rank, counts, bytes, a step's time by kind of action, versions, the commit. Cells that the file already has of this commit
are passed over, so that a run that was cut short goes on where it stood; those of another commit are measured again and
replaced. Prints a line a cell; exit 1 when one failed.

usage: gpu_bench.py --qeffect build/cuda/qeffect --output docs/measurements/FILE.jsonl [--cells REGEX] [--list]
"""
import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {"h2048": ("configs/paper_h2048_m4.json", 4), "h4096": ("configs/paper_h4096_m8.json", 8)}
INTERLEAVED = {"pipeline.schedule": "interleaved_1f1b", "pipeline.virtual_pipeline_model_parallel_size": 2}
ZBV = {"pipeline.schedule": "zbv", "pipeline.virtual_pipeline_model_parallel_size": 2}
BF16_STATE = {"optimizer.moments_dtype": "bf16"}
PER_MICROBATCH = {"pipeline.tape_slots": "per_microbatch", "gradients.w_group": 1}


def variants(microbatches):
    """Name → config keys. Moments are BF16 in all but the first four, which are the paper's paths."""
    accumulate = {"gradients.placement": "accumulate", "pipeline.tape_slots": "peak", **BF16_STATE}
    grouped = {**accumulate, "gradients.dtype": "bf16", "gradients.w_group": microbatches}
    return {
        "native": {**INTERLEAVED, **PER_MICROBATCH, "execution.mode": "eager", "pipeline.backward": "full",
                   "gradients.placement": "copied"},
        "eager": {**INTERLEAVED, **PER_MICROBATCH, "execution.mode": "eager", "gradients.placement": "copied"},
        "copied": {**INTERLEAVED, **PER_MICROBATCH, "gradients.placement": "copied"},
        "arena": {**INTERLEAVED, **PER_MICROBATCH, "gradients.placement": "arena"},
        "arena_zbv": {**ZBV, **PER_MICROBATCH, "gradients.placement": "arena", **BF16_STATE},
        "accumulate": {**INTERLEAVED, **accumulate, "gradients.dtype": "bf16", "gradients.w_group": 1},
        "accumulate_fp32": {**INTERLEAVED, **accumulate, "gradients.dtype": "fp32", "gradients.w_group": 1},
        "w_group": {**INTERLEAVED, **grouped},
        "w_group_half": {**INTERLEAVED, **grouped, "gradients.w_group": microbatches // 2},
        "w_group_zbv": {**ZBV, **grouped},
    }


def cells():
    for shape, (config, microbatches) in SHAPES.items():
        for gpus, transports in ((1, ("none",)), (2, ("ipc", "nccl"))):
            for transport in transports:
                for name, keys in variants(microbatches).items():
                    keys = {**keys, "execution.backend": "cuda", "pipeline.pipeline_model_parallel_size": gpus}
                    if gpus > 1:
                        keys["execution.transport"] = transport
                    if gpus == 1 and "zbv" not in name:
                        keys["pipeline.virtual_pipeline_model_parallel_size"] = 4  # four one-layer stages everywhere
                    if gpus == 1 and "zbv" in name:
                        continue  # two stages on one GPU: another cut
                    yield f"{shape}/{gpus}/{transport}/{name}", gpus, config, keys


def command(options, gpus, config, keys, output):
    line = options.mpirun.split() + ["-n", str(gpus)] if gpus > 1 else []
    line += [str(options.qeffect), "bench", "--config", str(ROOT / config)]
    for key, value in keys.items():
        line += ["--set", f"{key}={value}"]
    line += ["--steps", str(options.steps), "--warmup", str(options.warmup), "--output", str(output)]
    return line + ["--timeline", str(output) + ".trace"]


def measure(options, name, gpus, config, keys):
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(options.processes):
            output = Path(folder) / f"{i}.json"
            line = command(options, gpus, config, keys, output)
            done = subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=options.timeout)
            if done.returncode != 0:
                raise RuntimeError(f"{name}: exit {done.returncode}: {done.stdout[-600:]}")
            processes.append(json.loads(output.read_text()))
    first = processes[0]
    medians = [p["steps"]["median_ms"] for p in processes]
    return {
        "cell": name,
        "date": datetime.date.today().isoformat(),
        "commit": options.commit,
        "command": " ".join(str(part) for part in command(options, gpus, config, keys, "FILE")).replace(str(ROOT) + "/", ""),
        "device": first["device"],
        "environment": {k: v for k, v in first["environment"].items() if k not in ("host", "os")},
        "median_ms": statistics.median(medians),
        "process_median_ms": medians,
        "rank_ms": [p["steps"]["rank_ms"] for p in processes],
        "start_ms": first["steps"]["start_ms"],
        "graphs": first["steps"]["graphs"],
        "planned_bytes": first["steps"]["planned_bytes"],
        "taken_bytes": first["steps"]["taken_bytes"],
        "timeline": first["timeline"],
    }


def commit_here():
    """Of the tree that this script is in; None where git does not know it, as in an archive."""
    try:
        found = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def read_cells(path):
    lines = path.read_text().splitlines() if path.exists() else []
    return {cell["cell"]: cell for cell in map(json.loads, lines)}


def add_cell(path, cell):
    """The file with it, in order of the cells; whole at every moment."""
    known = {**read_cells(path), cell["cell"]: cell}
    new = path.with_suffix(".new")
    new.write_text("".join(json.dumps(known[name]) + "\n" for name in sorted(known)))
    new.replace(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qeffect", type=Path, default=ROOT / "build/cuda/qeffect")
    parser.add_argument("--output", type=Path, help="the file of lines that cells are added to")
    parser.add_argument("--cells", default=".", help="only those whose id matches this regular expression")
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one process")
    parser.add_argument("--mpirun", default="mpirun")
    parser.add_argument("--commit", default=commit_here(), help="what is measured, where git cannot say it")
    parser.add_argument("--list", action="store_true", help="print the ids and end")
    options = parser.parse_args()

    chosen = [cell for cell in cells() if re.search(options.cells, cell[0])]
    if options.list:
        print("\n".join(name for name, *_ in chosen))
        return 0
    if options.output is None or not chosen:
        parser.error("no cell matches --cells" if not chosen else "--output is missing")
    known = read_cells(options.output)
    failed = 0
    for name, gpus, config, keys in chosen:
        if name in known and known[name].get("commit") == options.commit:
            continue
        try:
            result = measure(options, name, gpus, config, keys)
        except (RuntimeError, subprocess.TimeoutExpired, OSError) as error:
            failed += 1
            print(f"{name}: FAILED: {error}", flush=True)
            continue
        add_cell(options.output, result)
        print(f"{name}: {result['median_ms']:.3f} ms {result['process_median_ms']}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
