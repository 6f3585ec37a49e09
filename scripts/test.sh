#!/usr/bin/env bash
# Installs what is missing, builds, checks layout and format, and runs the tests. Options: --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TXT
usage: scripts/test.sh [--fast | --slow | --drills | --asan | --tsan]
  (none)   layout and format checks, the fast tests, then the slow ones
  --fast   the checks and the fast tests: about two minutes after the build
  --slow   the checks and the slow tests only
  --drills the checks, and whole jobs that are killed, stopped, signalled, denied their disk or started over and over
  --asan   the fast tests under AddressSanitizer and UndefinedBehaviorSanitizer (preset cpu-asan)
  --tsan   the fast tests under ThreadSanitizer, without those under mpirun (preset cpu-tsan)
Tests that need a GPU are skipped, and say so, where there is none.
TXT
}

mode=${1:-all}
case "$mode" in
  --help | -h) usage && exit 0 ;;
  all | --fast | --slow | --drills | --asan | --tsan) [ $# -le 1 ] || { usage >&2; exit 2; } ;;
  *) usage >&2; exit 2 ;;
esac

case "$mode" in
  --asan) preset=cpu-asan ;;
  --tsan) preset=cpu-tsan ;;
  *)
    # Where the CUDA toolkit is, its backend is compiled and linked too; without a GPU its tests say that they skip.
    preset=cpu
    if have nvcc; then preset=cuda; fi
    ;;
esac

# Formatting is judged by the one release that made it: others differ in details. A machine without it skips the check.
check_format() {
  if ! have clang-format || ! clang-format --version | grep -q 'version 14\.'; then
    echo "format check skipped: it needs clang-format 14"
    return 0
  fi
  find app core kernels schedules tests \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
    xargs -0 -r clang-format --dry-run --Werror
}

# ctest with its closing line last; an empty selection is an error, never a pass.
run_tests() { "${launch[@]}" ctest --test-dir "build/$preset" --output-on-failure --no-tests=error -j2 "$@"; }

cd "$ROOT"
install_missing
say "Checking layout and format"
SECONDS=0
layout=(python3 scripts/check_layout.py)
if [ "$mode" = all ] || [ "$mode" = --slow ]; then layout+=(--headers); fi
"${layout[@]}"
check_format
echo "checked in $SECONDS s"

SECONDS=0
build_preset "$preset"
echo "built in $SECONDS s"

export_mpi_environment
launch=(env)
case "$mode" in
  --asan)
    launch+=(UBSAN_OPTIONS=print_stacktrace=1
      "LSAN_OPTIONS=suppressions=$ROOT/scripts/lsan.supp:print_suppressions=0")
    ;;
  --tsan)
    # ThreadSanitizer of gcc 12 cannot map its shadow under the address randomisation of new kernels.
    launch+=("TSAN_OPTIONS=halt_on_error=1:suppressions=$ROOT/scripts/tsan.supp")
    if setarch -R true 2>/dev/null; then launch+=(setarch -R); fi
    ;;
esac

if [ "$mode" != --slow ] && [ "$mode" != --drills ]; then
  say "Fast tests"
  case "$mode" in
    --asan)
      # Whole stacks, because lsan.supp knows Open MPI's leaks by an outer frame. They take half of a test's time, so the
      # long ones, which start no MPI, do without.
      run_tests -L runtime -LE 'slow|drill'
      launch+=(ASAN_OPTIONS=fast_unwind_on_malloc=0)
      run_tests -LE 'slow|drill|runtime'
      ;;
    --tsan) run_tests -LE 'slow|drill|mpi' ;;
    *) run_tests -LE 'slow|drill' ;;
  esac
fi
if [ "$mode" = all ] || [ "$mode" = --slow ]; then
  say "Slow tests"
  run_tests -L slow
fi
if [ "$mode" = --drills ]; then
  say "Drills"
  run_tests -L drill
fi
