#!/usr/bin/env python3
"""Writes the golden losses under tests/golden/losses anew: each file's config is run on the CPU backend.

A file holds a config, the losses and the gradient norms of its steps as C hex floats; tests compare them by bytes. Run
this only when the arithmetic was meant to change, and say why in the commit. A new case is a file with a config and two
empty lists. Prints the cases whose results changed.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GOLDENS = ROOT / "tests" / "golden" / "losses"


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes the golden losses of the CPU backend anew.")
    parser.add_argument("--build", type=Path, default=ROOT / "build" / "cpu", help="build folder (default: build/cpu)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a result would change")
    args = parser.parse_args()
    program = args.build / "tests" / "runtime" / "golden_losses"
    if not program.exists():
        sys.exit(f"{program} does not exist; build the target golden_losses or name the build folder with --build.")
    changed = 0
    for path in sorted(GOLDENS.glob("*.json")):
        lines = subprocess.run([program, path], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()
        golden = json.loads(path.read_text(encoding="utf-8"))
        results = {"losses": lines[0].split(), "gradient_norms": lines[1].split()}
        if all(golden[key] == value for key, value in results.items()):
            continue
        changed += 1
        print(f"{path.stem}: changed")
        if not args.check:
            path.write_text(json.dumps(golden | results, indent=1) + "\n", encoding="utf-8")
    if args.check and changed:
        sys.exit(1)


if __name__ == "__main__":
    main()
