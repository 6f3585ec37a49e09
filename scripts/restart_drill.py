#!/usr/bin/env python3
"""Restarts a small run in fresh processes under other pipeline mappings, and compares it with one that nothing stopped.

The uninterrupted run is one rank, 1f1b, eager, with a checkpoint after every step. Against it stand, each a row of the result:
a save after step 3 continued to step 8 for {eager, graph} x {interleaved_1f1b, zbv}, and a chain of one, two, four, two
and one ranks whose schedule, chunks, slots and placement change at every start. Compared at every step: loss and gradient norm
as metrics.jsonl has them, and every tensor of the checkpoint, scaling state included, by `qeffect inspect --diff`.
On GPUs ranks share a card where there are fewer cards than ranks. Writes JSON; exits 1 when a step differs.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import time

STEPS = 8
CONFIG = {
    "model": {"num_layers": 8, "hidden_size": 64, "ffn_hidden_size": 256, "num_attention_heads": 1},
    "fp8": {"amax_history_len": 4},
    "training": {"seq_length": 32, "global_batch_size": 8, "lr": 1e-3, "eval_interval": 0},
    "checkpoint": {"interval": 1, "keep_last": 1000},
}
CONFIG_GPU = {"hidden_size": 512, "ffn_hidden_size": 2048, "num_attention_heads": 8}  # head_dim 64 on both


def mapping(ranks, schedule, chunks, slots, mode, placement="accumulate"):
    keys = {
        "pipeline.pipeline_model_parallel_size": ranks,
        "pipeline.schedule": schedule,
        "pipeline.virtual_pipeline_model_parallel_size": chunks,
        "pipeline.tape_slots": slots,
        "execution.mode": mode,
        "gradients.placement": placement,
    }
    return ranks, keys


UNINTERRUPTED = mapping(1, "1f1b", 1, "per_microbatch", "eager")
CASES = {
    f"{mode} {schedule}": [(mapping(2, schedule, 2, "peak", mode), 3), (mapping(2, schedule, 2, "peak", mode), STEPS)]
    for mode in ("eager", "graph")
    for schedule in ("interleaved_1f1b", "zbv")
}
CASES["chain over 1, 2, 4, 2 and 1 ranks"] = [
    (mapping(1, "1f1b", 1, "per_microbatch", "graph"), 2),
    (mapping(2, "interleaved_1f1b", 2, "peak", "eager"), 4),
    (mapping(4, "1f1b", 1, "per_microbatch", "graph"), 5),
    (mapping(2, "zbv", 2, "peak", "graph"), 7),
    (mapping(1, "1f1b", 1, "peak", "graph"), STEPS),
]


class Drill:
    def __init__(self, options, folder):
        self.options = options
        self.folder = pathlib.Path(folder)
        config = {**CONFIG, "execution": {"backend": options.backend, "transport": options.transport}}
        if options.backend == "cuda":
            config["model"] = {**CONFIG["model"], **CONFIG_GPU}
        (self.folder / "c.json").write_text(json.dumps(config))
        (self.folder / "t.txt").write_bytes(bytes((i * i + i // 7) % 26 + 97 for i in range(5000)))
        self.qeffect("tokenize", "--input", self.folder / "t.txt", "--output", self.folder / "t.bin")

    def qeffect(self, *arguments, ranks=1):
        command = [*self.options.mpirun.split(), "-n", str(ranks)] if ranks > 1 else []
        command += [str(self.options.qeffect), *map(str, arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        return done.returncode, done.stdout

    def train(self, name, segments):
        """The segments one after another, each in fresh processes; raises with the output of one that failed."""
        for (ranks, keys), last in segments:
            code, text = self.qeffect(
                "train", "--config", self.folder / "c.json", "--resume", "--set", f"data.train={self.folder / 't.bin'}",
                f"training.train_iters={last}", f"checkpoint.dir={self.folder / name}",
                f"report.dir={self.folder / (name + '_report')}", *(f"{k}={v}" for k, v in keys.items()), ranks=ranks,
            )
            if code != 0:
                raise RuntimeError(f"{name}, to step {last} on {ranks} ranks: exit code {code}\n{text}")
        lines = (self.folder / (name + "_report") / "metrics.jsonl").read_text().splitlines()
        steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
        return {s["step"]: (s["loss"], s["grad_norm"]) for s in steps}

    def run(self):
        wanted = self.train("uninterrupted", [(UNINTERRUPTED, STEPS)])
        rows = []
        for name, segments in CASES.items():
            started, different = time.monotonic(), []
            folder = re.sub(r"\W+", "_", name)
            found = self.train(folder, segments)
            for step in range(1, STEPS + 1):
                checkpoint = f"step_{step:08d}"
                code, text = self.qeffect(
                    "inspect", "--diff", self.folder / "uninterrupted" / checkpoint, self.folder / folder / checkpoint
                )
                if code != 0 or found[step] != wanted[step]:
                    different.append(step)
                    print(f"{name}, step {step}: {found[step]}, wanted {wanted[step]}\n{text}")
            print(f"{name}: {'equal' if not different else 'different'} in {time.monotonic() - started:.1f} s", flush=True)
            rows.append({"case": name, "starts": len(segments), "steps": STEPS, "different_steps": different})
        return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qeffect", type=pathlib.Path, required=True, help="the program")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--transport", choices=["auto", "ipc", "nccl"], default="auto", help="of the GPUs' messages")
    parser.add_argument("--mpirun", default="mpirun --oversubscribe")
    parser.add_argument("--output", type=pathlib.Path, help="the JSON of the result; else it is printed")
    options = parser.parse_args()
    options.qeffect = options.qeffect.resolve()
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows = Drill(options, folder).run()
        except RuntimeError as error:
            sys.exit(str(error))
    text = json.dumps({"backend": options.backend, "transport": options.transport, "cases": rows}, indent=1)
    if options.output:
        options.output.write_text(text + "\n")
    else:
        print(text)
    sys.exit(1 if any(row["different_steps"] for row in rows) else 0)


if __name__ == "__main__":
    main()
