#!/usr/bin/env python3
"""Holds docs/field_reports.md against the sources: every row's tests exist under exactly that name, ids ascend.

A row's last cell holds items, parted by <br>: `path`: name of a test case, or [page](path), or plain words before the
test that shows them. One line a fault, exit 1 if there is any.
"""
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "docs/field_reports.md"
ROW = re.compile(r"^\| (A\d\d) \| (.+) \| (.+) \|$")
TEST = re.compile(r"^`([^`]+)`: (.+)$")
PAGE = re.compile(r"^\[[^\]]+\]\(([^)]+)\)$")
# A name may be written as several literals, one after the other.
CASE = re.compile(r'TEST_CASE\(\s*((?:"(?:[^"\\]|\\.)*"\s*)+)')
LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def names_in(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    return {re.sub(r"\\(.)", r"\1", "".join(LITERAL.findall(case))) for case in CASE.findall(text)}


def item_fault(item: str) -> str | None:
    page = PAGE.match(item)
    if page:
        return None if (TABLE.parent / page.group(1)).is_file() else f"{page.group(1)} is no page"
    test = TEST.match(item)
    if not test:
        return f"{item} is no test of the form `path`: name" if item.startswith("`") else None
    path = ROOT / test.group(1)
    if not path.is_file():
        return f"{test.group(1)} is no file"
    return None if test.group(2) in names_in(path) else f'{test.group(1)} has no test "{test.group(2)}"'


def main() -> None:
    faults, ids = [], []
    for number, line in enumerate(TABLE.read_text(encoding="utf-8").splitlines(), 1):
        if not line.startswith("| A"):
            continue
        row = ROW.match(line)
        if not row:
            faults.append(f"line {number}: is no row of id, symptom and tests")
            continue
        ids.append(row.group(1))
        items = [item.strip() for item in row.group(3).split("<br>")]
        if not any(TEST.match(item) or PAGE.match(item) for item in items):
            faults.append(f"line {number}, {row.group(1)}: names neither a test nor a page")
        faults += [f"line {number}, {row.group(1)}: {fault}" for fault in map(item_fault, items) if fault]
    if ids != sorted(set(ids)) or not ids:
        faults.append("ids do not ascend, or there are none")
    for fault in faults:
        print(f"docs/field_reports.md: {fault}")
    if faults:
        sys.exit(1)
    print(f"field reports: {len(ids)} rows, every test is there")


if __name__ == "__main__":
    main()
