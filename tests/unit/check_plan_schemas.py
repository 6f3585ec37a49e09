#!/usr/bin/env python3
"""What qeffect plan prints and measures fits its JSON Schemas, and broken forms of it do not.

usage: check_plan_schemas.py QEFFECT SOURCE_DIR
"""
import copy
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema


def main():
    qeffect, source = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    validators = {}
    for name in ("plan", "costs", "config"):
        schema = json.loads((source / f"configs/schema/{name}.schema.json").read_text())
        jsonschema.Draft7Validator.check_schema(schema)
        validators[name] = jsonschema.Draft7Validator(schema)

    def hold(name, sample):
        validators[name].validate(sample)
        for key in sample:  # the schema can fail: no key may be missing, none added
            broken = copy.deepcopy(sample)
            del broken[key]
            assert not validators[name].is_valid(broken), f"{name} without {key} passes"
        assert not validators[name].is_valid({**sample, "extra": 1})

    def plan(*options):
        command = [qeffect, "plan", "--config", source / "configs/quickstart.json", *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    with tempfile.TemporaryDirectory() as folder:
        small = [part for key in ("model.hidden_size=32", "model.ffn_hidden_size=64", "training.seq_length=16")
                 for part in ("--set", key)]
        costs = Path(folder) / "costs.json"
        plan(*small, "--measure-costs", costs)
        hold("costs", json.loads(costs.read_text()))
        for options in ([], ["--costs", costs], ["--set", "gradients.w_group=2"]):
            sample = json.loads(plan(*([] if "gradients.w_group=2" in options else small), "--json", *options))
            hold("plan", sample)
            validators["config"].validate(sample["config"])

        lists = Path(folder) / "lists.csv"
        for form in ("compute", "lowered"):  # what is printed is read back to the same lists
            lists.write_text(plan("--csv", form))
            as_file = ["--set", "pipeline.schedule=csv", "--set", f"pipeline.schedule_csv={lists}"]
            assert plan("--csv", form, *as_file) == lists.read_text()
        refused = subprocess.run([qeffect, "plan", "--config", source / "configs/quickstart.json", "--csv", "compute",
                                  "--set", "gradients.w_group=2"], capture_output=True, text=True)
        assert refused.returncode == 3 and "gradients.w_group" in refused.stderr, refused


if __name__ == "__main__":
    main()
