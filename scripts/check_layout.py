#!/usr/bin/env python3
"""Checks the walls between rooms that the compiler alone would let one break: who may include whom, what may stand where.

CMake's link graph enforces most directions; this also catches an include that happens to compile. One line a violation,
exit 1 if there is any. With --headers every header is compiled alone too (about a second a header). Formatting is
test.sh's.
"""
import argparse
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TOP_LEVEL = set(
    ".ci .clang-format .clang-tidy .gitignore ARCHITECTURE.md CMakeLists.txt CMakePresets.json CONTRIBUTING.md LICENSE "
    "README.md app cmake configs core docs kernels schedules scripts tests".split()
)
# What git ignores; looked at only where git is not there to say so.
IGNORED_TOP_LEVEL = re.compile(r"^(\.git|build|build-.*|runs|data|\.cache|compile_commands\.json)$")
SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh"}
TEXT_SUFFIXES = SOURCE_SUFFIXES | {".md", ".py", ".sh", ".json", ".txt", ".cmake", ".csv", ""}
WARN_LINES = 500

MPI = r"mpi\.h$"
JSON = r"nlohmann/"
CLI = r"CLI/"
CUDA = r"(cuda|cublas|cudnn|nccl|nvtx|cub/|cooperative_groups|mma\.h)"

# (files, includes they must not have, why). A path is matched from its beginning, as written from the root.
WALLS = [
    (r"core/", f"{MPI}|{JSON}|{CLI}|{CUDA}", "core knows no MPI, JSON, command line or CUDA"),
    (r"core/", r"(app|schedules|kernels|tests)/", "core is below every other room"),
    (r"core/[^/]*$", r"core/(qeffect|stage|runtime)/", "the seams stand below the rooms that use them"),
    (r"core/qeffect/", r"core/(ops|ops_args|transport)\.h|core/(stage|fp8|runtime)/", "the contract cannot call arithmetic"),
    (r"core/qeffect/(?!handoff\.)", r"core/device\.h", "in the contract only the hand-off touches streams and events"),
    (r"core/stage/", r"core/(qeffect|runtime)/", "the arithmetic cannot see the contract"),
    (r"core/fp8/", r"core/(qeffect|stage|runtime)/", "fp8 holds rules and state, no stage and no contract"),
    (r"schedules/", r"(app|kernels|tests)/|core/(qeffect|stage|runtime|fp8)/", "a schedule is a pure function of its shape"),
    (r"schedules/", f"{MPI}|{JSON}|{CLI}|{CUDA}", "a schedule is a pure function of its shape"),
    (r"kernels/", r"(app|schedules|tests)/", "backends implement core's seams and know nothing above"),
    (r"kernels/", r"core/(qeffect|stage|runtime)/", "backends implement Device, Ops and Transport, not what calls them"),
    (r"kernels/", f"{JSON}|{CLI}", "JSON and the command line belong to app"),
    (r"kernels/cpu/", f"kernels/cuda/|{CUDA}", "the two backends do not see each other"),
    (r"kernels/cuda/", r"kernels/cpu/", "the two backends do not see each other"),
    (r"app/", f"{CUDA}|tests/", "app reaches a GPU only through core's seams"),
    (r"app/", r"kernels/(cpu|cuda)/", "app gets its backend from kernels/backend.h"),
]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.M)
BACKEND_SWITCH = re.compile(r"^\s*#\s*(if|ifdef|ifndef|elif)\b.*\bQE_WITH_CUDA\b", re.M)
OWN_ENVIRONMENT = re.compile(r'getenv\s*\(\s*"(QE|qe)')
# Spelt in pieces, so that this file does not contain what it looks for.
FAST_MATH = re.compile("use_fast" + "_math|-ff" + "ast-math")
HOME_PATH = re.compile(r"(?<![\w./$}~-])/(" + "|".join(["home", "Users", "work", "root"]) + r")/[\w.-]+")


def tracked_files() -> list[str]:
    """Paths from the root: what git tracks or would add, or everything outside the ignored folders without git."""
    if shutil.which("git") and (ROOT / ".git").exists():
        listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                capture_output=True, text=True)
        if listed.returncode == 0:
            return sorted({name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()})
    return sorted(
        path.relative_to(ROOT).as_posix()
        for top in ROOT.iterdir() if not IGNORED_TOP_LEVEL.match(top.name)
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    )


def include_faults(name: str, text: str) -> list[str]:
    faults = []
    for match in INCLUDE.finditer(text):
        target = match.group(1)
        for files, forbidden, why in WALLS:
            if re.match(files, name) and re.match(forbidden, target):
                line = text.count("\n", 0, match.start(1)) + 1
                faults.append(f"{name}:{line}: includes {target}: {why}")
    return faults


def is_introduced_by_header(path: Path) -> bool:
    """A source is introduced by the header of its name, or by its folder's (schedules/schedules.h)."""
    own, folders = path.with_suffix(".h"), path.parent / (path.parent.name + ".h")
    return path.suffix in (".cpp", ".cu") and (own.exists() or folders.exists())


def source_faults(name: str, text: str) -> list[str]:
    faults = include_faults(name, text)
    if name != "kernels/backend.cpp" and BACKEND_SWITCH.search(text):
        faults.append(f"{name}: switches on QE_WITH_CUDA: only kernels/backend.cpp may")
    if OWN_ENVIRONMENT.search(text):
        faults.append(f"{name}: reads an environment variable of our own: make it a config key")
    if Path(name).name in ("common.h", "utils.h"):
        faults.append(f"{name}: a header is named after what it holds")
    if not text.startswith("//") and not is_introduced_by_header(ROOT / name):
        faults.append(f"{name}: opens without a comment on what it owns and what it does not")
    return faults


def file_faults(name: str) -> list[str]:
    suffix = Path(name).suffix
    if suffix not in TEXT_SUFFIXES:
        return []
    try:
        text = (ROOT / name).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return [f"{name}: is not UTF-8 text"]
    faults = source_faults(name, text) if suffix in SOURCE_SUFFIXES else []
    # Documentation may name the flag that it forbids.
    if suffix != ".md" and FAST_MATH.search(text):
        faults.append(f"{name}: fast math breaks the promises of equal bits")
    home = HOME_PATH.search(text)
    if home:
        faults.append(f"{name}: names a path of one machine: {home.group(0)}")
    return faults


def top_level_faults(names: list[str]) -> list[str]:
    extra = {name.split("/")[0] for name in names} - TOP_LEVEL
    return [f"{entry}: is not an agreed top-level entry (TOP_LEVEL in scripts/check_layout.py)" for entry in sorted(extra)]


def long_files(names: list[str]) -> list[str]:
    counts = ((name, (ROOT / name).read_bytes().count(b"\n")) for name in names if Path(name).suffix in SOURCE_SUFFIXES)
    return [f"{name}: {lines} lines: does it hold two things?" for name, lines in counts if lines > WARN_LINES]


def mpi_flags() -> list[str]:
    shown = subprocess.run(["mpicxx", "--showme:compile"], capture_output=True, text=True)
    return shown.stdout.split() if shown.returncode == 0 else []


def header_faults(names: list[str]) -> list[str]:
    """Every header compiles alone. Those of the CUDA backend are left to the CUDA build."""
    headers = [name for name in names if name.endswith(".h") and not name.startswith("kernels/cuda/")]
    command = ["g++", "-std=c++20", "-fsyntax-only", "-I", str(ROOT), *mpi_flags(), "-include"]

    def compile_alone(name: str) -> list[str]:
        done = subprocess.run([*command, name, "-x", "c++", os.devnull], cwd=ROOT, capture_output=True, text=True)
        first = next((line for line in done.stderr.splitlines() if "error:" in line), done.stderr.strip())
        return [] if done.returncode == 0 else [f"{name}: does not compile alone: {first}"]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [fault for faults in pool.map(compile_alone, headers) for fault in faults]


def main() -> None:
    parser = argparse.ArgumentParser(description="Checks the walls between the rooms of the source tree.")
    parser.add_argument("--headers", action="store_true", help="also compile every header alone")
    args = parser.parse_args()
    names = tracked_files()
    faults = top_level_faults(names) + [fault for name in names for fault in file_faults(name)]
    if args.headers:
        faults += header_faults(names)
    for warning in long_files(names):
        print(f"warning: {warning}")
    for fault in faults:
        print(fault)
    if faults:
        sys.exit(1)
    print(f"layout: {len(names)} files, no violation")


if __name__ == "__main__":
    main()
