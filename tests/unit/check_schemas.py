#!/usr/bin/env python3
"""Sample reports and every committed config fit their JSON Schemas, and broken ones do not.

usage: check_schemas.py SAMPLE_REPORTS SOURCE_DIR   (SAMPLE_REPORTS writes the samples into the folder it is given)
"""
import copy
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import jsonschema


def strict(text):
    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def main():
    sample_reports, source = Path(sys.argv[1]).resolve(), Path(sys.argv[2])
    validators = {}
    for name in ("report", "config"):
        schema = strict((source / f"configs/schema/{name}.schema.json").read_text())
        jsonschema.Draft7Validator.check_schema(schema)
        validators[name] = jsonschema.Draft7Validator(schema)

    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sample_reports, folder], check=True)
        samples = [strict(p.read_text()) for p in sorted(Path(folder).glob("report*.json"))]
    assert len(samples) == 3, samples
    for sample in samples:
        validators["report"].validate(sample)
        validators["config"].validate(sample["config"])
        for key in sample:  # the schema can fail: no key may be missing, none added
            broken = copy.deepcopy(sample)
            del broken[key]
            assert not validators["report"].is_valid(broken), f"a report without {key} passes"
        assert not validators["report"].is_valid({**sample, "extra": 1})

    configs = sorted((source / "configs").glob("*.json"))
    assert configs
    for path in configs:
        text = re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.MULTILINE)
        validators["config"].validate(strict(text))
        print(path.name, "fits")
    assert not validators["config"].is_valid({"model": {"hidden_siz": 1}})
    assert not validators["config"].is_valid({"training": {"lr": "fast"}})


if __name__ == "__main__":
    main()
