#!/usr/bin/env bash
# Builds the CUDA preset on a machine with a GPU, runs what needs one, and writes one JSON of results.
# Installs nothing: the packages of scripts/test.sh and the CUDA toolkit must be there. Options: --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TXT
usage: scripts/gpu_tests.sh [--output DIR] [--tests REGEX] [--slow] [--sanitize] [--bench]
  --output DIR   where results.json and the logs go (default build/gpu-results)
  --tests REGEX  only the tests whose name matches
  --slow         the slow cases too
  --sanitize     compute-sanitizer: memcheck on the operations and a small run, racecheck on the operations
  --bench        qeffect bench --ops at the two paper shapes on one GPU
TXT
}

output=$ROOT/build/gpu-results tests=. slow=no sanitize=no bench=no
while [ $# -gt 0 ]; do
  case "$1" in
    --help | -h) usage && exit 0 ;;
    --output) output=$2 && shift ;;
    --tests) tests=$2 && shift ;;
    --slow) slow=yes ;;
    --sanitize) sanitize=yes ;;
    --bench) bench=yes ;;
    *) usage >&2 && exit 2 ;;
  esac
  shift
done

have nvidia-smi || die "there is no nvidia-smi: this script needs a machine with an NVIDIA GPU."
mkdir -p "$output"
output=$(cd "$output" && pwd)
cd "$ROOT"
SECONDS=0
build_preset cuda
echo "built in $SECONDS s"
export_mpi_environment
status=0

run_tests() {  # NAME CTEST_ARGUMENTS...
  local name=$1
  shift
  say "Tests: $name"
  ctest --test-dir build/cuda --output-on-failure --no-tests=error -j4 -R "$tests" --output-junit "$output/$name.xml" "$@" ||
    status=1
}
run_tests fast -L 'ops|gpu' -LE 'slow|drill'
if [ $slow = yes ]; then run_tests slow -L 'slow'; fi

sanitizer() {  # TOOL NAME COMMAND...
  local tool=$1 name=$2
  shift 2
  say "compute-sanitizer $tool: $name"
  compute-sanitizer --tool "$tool" --error-exitcode 9 --log-file "$output/$tool-$name.log" "$@" >"$output/$tool-$name.out" 2>&1 || {
    status=1
    tail -20 "$output/$tool-$name.log" "$output/$tool-$name.out"
  }
  tail -1 "$output/$tool-$name.log"
}
if [ $sanitize = yes ]; then
  sanitizer memcheck ops build/cuda/tests/ops/qe_ops_tests '~[slow]'
  sanitizer racecheck ops build/cuda/tests/ops/qe_ops_tests -# '~[slow]~[#gemm_test]'  # own kernels
  sanitizer memcheck bench build/cuda/qeffect bench --config configs/quickstart.json --steps 2 --warmup 1 \
    --set pipeline.pipeline_model_parallel_size=1 --set execution.backend=cuda
fi

if [ $bench = yes ]; then
  for shape in paper_h2048_m4 paper_h4096_m8 h4096_m8_zbv; do
    say "Bench: $shape on one GPU"
    build/cuda/qeffect bench --config "configs/$shape.json" --set pipeline.pipeline_model_parallel_size=1 \
      --set execution.backend=cuda --steps 30 --warmup 5 --ops --output "$output/bench-$shape.json" || status=1
  done
fi

python3 - "$output" <<'PY'
import datetime, json, pathlib, subprocess, sys, xml.etree.ElementTree as xml
folder = pathlib.Path(sys.argv[1])
query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
result = {
    "date": datetime.date.today().isoformat(),
    "command": "scripts/gpu_tests.sh",
    "gpus": subprocess.run(query, capture_output=True, text=True).stdout.strip().splitlines(),
    "tests": {},
}
for path in sorted(folder.glob("*.xml")):
    for case in xml.parse(path).getroot().iter("testcase"):
        result["tests"][case.get("name")] = {"status": case.get("status"), "seconds": float(case.get("time"))}
for path in sorted(folder.glob("bench-*.json")):
    result.setdefault("bench", {})[path.stem[len("bench-"):]] = json.loads(path.read_text())
for path in sorted(folder.glob("*check-*.log")):
    lines = path.read_text().strip().splitlines()
    result.setdefault("sanitizer", {})[path.stem] = lines[-1] if lines else ""
(folder / "results.json").write_text(json.dumps(result, indent=1) + "\n")
PY
say "Results in $output/results.json"
exit $status
