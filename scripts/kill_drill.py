#!/usr/bin/env python3
"""Kills all ranks of a small job at random moments, half of them inside a save, and starts the same command again.

After every kill the newest complete checkpoint that `latest` announces is found by `qeffect inspect --verify`, apart from
the run. The next start must take it, say what newer or unfinished ones it passed over, and print the parameter digest that
an undisturbed run had at that step. No hand is needed between two starts. Writes the counts as JSON; exits 1 when a start
went wrong.
"""

import argparse
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

STEPS = 200
INTERVAL = 2
CONFIG = {
    "model": {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256},
    "fp8": {"amax_history_len": 4},
    "training": {"seq_length": 16, "global_batch_size": 4, "train_iters": STEPS, "lr": 1e-3},
    "pipeline": {"schedule": "1f1b"},
    "execution": {"backend": "cpu"},
    "runtime": {"timeout_s": 20},
    "checkpoint": {"interval": INTERVAL},
}
SAVED = re.compile(r"saved \S*step_(\d+) in .* parameters XXH3 ([0-9a-f]{16})")
RESUMED = re.compile(r"resumed from \S*step_(\d+) after step \d+, parameters XXH3 ([0-9a-f]{16})")


class Drill:
    def __init__(self, options, folder):
        self.options = options
        self.folder = pathlib.Path(folder)
        self.random = random.Random(options.seed)
        self.digests = {}  # of the undisturbed run, by step
        text = bytes((i * i + i // 7) % 26 + 97 for i in range(3000))
        (self.folder / "t.txt").write_bytes(text)
        (self.folder / "c.json").write_text(json.dumps(CONFIG))
        self.qeffect("tokenize", "--input", self.folder / "t.txt", "--output", self.folder / "t.bin")

    def qeffect(self, *arguments):
        command = [self.options.qeffect, *map(str, arguments)]
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)

    def start(self, name, *more):
        """The command that a user would give again and again; its output goes to a file."""
        checkpoints = self.folder / name
        command = [
            self.options.mpiexec, "--oversubscribe", "-n", str(self.options.ranks), self.options.qeffect, "train",
            "--config", self.folder / "c.json", "--resume", "--set", f"data.train={self.folder / 't.bin'}",
            f"checkpoint.dir={checkpoints}", f"report.dir={self.folder / (name + '_report')}",
            f"pipeline.pipeline_model_parallel_size={self.options.ranks}", *more,
        ]
        output = open(self.folder / "output.txt", "w+", encoding="utf-8", errors="replace")
        process = subprocess.Popen([str(c) for c in command], stdout=output, stderr=subprocess.STDOUT)
        return process, output

    def text(self):
        return (self.folder / "output.txt").read_text(encoding="utf-8", errors="replace")

    def make_reference(self):
        process, output = self.start("reference", "checkpoint.keep_last=1000000")
        code = process.wait()
        output.close()
        if code != 0:
            sys.exit("the undisturbed run failed:\n" + self.text())
        self.digests = {int(step): digest for step, digest in SAVED.findall(self.text())}

    def newest_complete(self, checkpoints):
        """Its step, and the names that a reader has to pass over: unfinished, damaged, or not yet announced ones."""
        names = sorted(p.name for p in checkpoints.iterdir()) if checkpoints.exists() else []
        passed = [n for n in names if n.startswith("step_") and n.endswith(".tmp")]
        steps = [n for n in names if re.fullmatch(r"step_\d{8}", n)]
        pointer = checkpoints / "latest"
        announced = pointer.read_text().strip() if pointer.exists() else ""
        above = [n for n in steps if announced and n > announced]
        for name in reversed([n for n in steps if n not in above]):
            if self.qeffect("inspect", checkpoints / name, "--verify").returncode == 0:
                return int(name[5:]), passed + above
            passed.append(name)
        for name in above:
            if self.qeffect("inspect", checkpoints / name, "--verify").returncode == 0:
                return int(name[5:]), passed
            passed.append(name)
        return None, passed

    def ranks_of(self, launcher):
        found = []
        for task in pathlib.Path(f"/proc/{launcher}/task").glob("*"):
            found += [int(p) for p in (task / "children").read_text().split()]
        return found

    def wait_for(self, process, condition, pause_s, seconds=60):
        until = time.monotonic() + seconds
        while not condition():
            if process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(pause_s)
        return True

    def kill_once(self, inside):
        """Starts, kills all ranks at once, waits for the launcher. Returns (output, killed, in a save)."""
        checkpoints = self.folder / "run"
        process, output = self.start("run")
        self.wait_for(process, lambda: "step  " in self.text(), 0.01)
        time.sleep(self.random.uniform(0, 0.4))
        saving = lambda: any(p.name.endswith(".tmp") for p in checkpoints.glob("*"))  # noqa: E731
        if inside and self.wait_for(process, saving, 0.001):
            time.sleep(self.random.uniform(0, self.options.save_ms / 1e3))
        in_save = saving()
        ranks = self.ranks_of(process.pid) if process.poll() is None else []
        for rank in ranks:
            try:
                os.kill(rank, signal.SIGKILL)
            except ProcessLookupError:
                pass
        process.wait(timeout=60)
        output.close()
        return self.text(), bool(ranks), in_save

    def run(self):
        counts = {"kills": 0, "inside_saves": 0, "resumed": 0, "fresh_starts": 0, "passed_over": 0, "finished": 0}
        faults = []
        checkpoints = self.folder / "run"
        while counts["kills"] < self.options.kills and not faults:
            expected, passed = self.newest_complete(checkpoints)
            text, killed, in_save = self.kill_once(inside=counts["kills"] % 2 == 0)
            counts["kills"] += killed
            counts["inside_saves"] += killed and in_save
            found = RESUMED.search(text)
            if found is None and "run folder" not in text:
                continue  # killed before it could say where it starts
            step = int(found.group(1)) if found else None
            if step != expected:
                faults.append(f"started from step {step}, and the newest complete one is {expected}:\n{text}")
            if found and found.group(2) != self.digests[step]:
                faults.append(f"step {step} has the digest {found.group(2)}, wanted {self.digests[step]}:\n{text}")
            for name in passed:
                if not re.search(f"passed over: .*{name}", text):
                    faults.append(f"nothing is said of {name}:\n{text}")
            counts["resumed" if found else "fresh_starts"] += 1
            counts["passed_over"] += len(passed)
            if any(self.digests.get(int(s)) != d for s, d in SAVED.findall(text)):
                faults.append(f"a digest differs from the undisturbed run's:\n{text}")
            if expected == STEPS or f"step_{STEPS:08d}" in text:
                counts["finished"] += 1
                subprocess.run(["rm", "-rf", str(checkpoints)], check=True)
        return counts, faults


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--qeffect", default="build/cpu/qeffect", help="the executable")
    parser.add_argument("--mpiexec", default="mpirun")
    parser.add_argument("--ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--save-ms", type=float, default=40, help="the kill in a save comes within this time of its start")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", help="JSON file for the counts")
    options = parser.parse_args()
    options.qeffect = str(pathlib.Path(options.qeffect).resolve())
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="qeffect-drill-") as folder:
        drill = Drill(options, folder)
        drill.make_reference()
        counts, faults = drill.run()
    result = {"seed": options.seed, "ranks": options.ranks, **counts, "faults": len(faults),
              "seconds": round(time.monotonic() - start)}
    print(json.dumps(result))
    if options.output:
        pathlib.Path(options.output).write_text(json.dumps(result, indent=2) + "\n")
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
