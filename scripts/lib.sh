# shellcheck shell=bash
# What quickstart.sh and test.sh share: install the missing packages, build a preset, and the environment of mpirun.
# Sourced, never run. It does not train, test or fetch text.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n== %s\n' "$*"; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }
# A header counts as present when the compiler finds it, wherever the user installed it.
have_header() { have g++ && g++ -std=c++17 -E -x c++ -include "$1" /dev/null >/dev/null 2>&1; }
have_package() { dpkg-query -W -f '${Status}' "$1" 2>/dev/null | grep -q 'ok installed'; }

# Prints the Debian names of what is missing, one a line. Tools and headers from elsewhere than a package count too.
missing_packages() {
  have g++ || echo g++
  have cmake || echo cmake
  have ninja || echo ninja-build
  have pkg-config || echo pkg-config
  have mpirun || echo openmpi-bin
  have mpicxx || echo libopenmpi-dev
  have python3 || echo python3
  have_package nlohmann-json3-dev || have_header nlohmann/json.hpp || echo nlohmann-json3-dev
  have_package libcli11-dev || have_header CLI/CLI.hpp || echo libcli11-dev
  have_package catch2 || have_header catch2/catch.hpp || have_header catch2/catch_all.hpp || echo catch2
  have_package libxxhash-dev || have_header xxhash.h || echo libxxhash-dev
  have_package python3-jsonschema || python3 -c 'import jsonschema' >/dev/null 2>&1 || echo python3-jsonschema
}

# Installs what is missing, as root or through sudo; calls apt not at all when nothing is.
install_missing() {
  local packages as_root=()
  mapfile -t packages < <(missing_packages)
  [ ${#packages[@]} -gt 0 ] || return 0
  have apt-get || die "this system has no apt-get: install the equivalents of these Debian packages and run me again: ${packages[*]}"
  if [ "$(id -u)" -ne 0 ]; then
    # sudo may ask for its password on a terminal, never in a script.
    if have sudo && { sudo -n true 2>/dev/null || [ -t 0 ]; }; then
      as_root=(sudo)
    else
      die "packages are missing and I am neither root nor able to use sudo: ask for 'apt-get install ${packages[*]}' and run me again."
    fi
  fi
  say "Installing ${packages[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=120 -o Dpkg::Use-Pty=0)
  # A source that cannot be reached is apt's warning; whether the packages can be had is for the install to say.
  "${apt[@]}" update </dev/null || true
  "${apt[@]}" install -y --no-install-recommends "${packages[@]}" </dev/null >/dev/null ||
    die "apt-get could not install ${packages[*]}: see its message above, then run me again."
  mapfile -t packages < <(missing_packages)
  [ ${#packages[@]} -eq 0 ] || die "apt-get succeeded but I still do not find ${packages[*]}: is another toolchain first in PATH?"
}

# All cores, but no more compilers at once than memory holds at about 1.5 GB each.
build_jobs() {
  local cores memory_kb jobs
  cores=$(nproc)
  memory_kb=$(awk '/^MemAvailable:/ {print $2}' /proc/meminfo)
  jobs=$((memory_kb / 1500000))
  [ "$jobs" -lt "$cores" ] || jobs=$cores
  [ "$jobs" -ge 1 ] || jobs=1
  echo "$jobs"
}

# build_preset PRESET [TARGET...]: configure on every call (cheap, and right after a pull), then build what changed.
build_preset() {
  local preset=$1 log jobs targets=()
  shift
  [ $# -eq 0 ] || targets=(--target "$@")
  have ccache && export CMAKE_CXX_COMPILER_LAUNCHER=ccache
  jobs=$(build_jobs)
  say "Building the preset $preset with $jobs jobs"
  mkdir -p "$ROOT/build"
  log="$ROOT/build/configure-$preset.log"
  (cd "$ROOT" && cmake --preset "$preset") >"$log" 2>&1 || {
    cat "$log" >&2
    die "cmake could not configure the preset $preset: its message is above and in $log."
  }
  (cd "$ROOT" && cmake --build --preset "$preset" -j "$jobs" "${targets[@]}")
}

# mpirun's environment on laptops, in containers and as root: no pinning, no refusal, no warnings about the sandbox.
export_mpi_environment() {
  export OMPI_MCA_btl_vader_single_copy_mechanism=none
  export OMPI_MCA_hwloc_base_binding_policy=none
  export OMPI_MCA_rmaps_base_oversubscribe=1
  if [ "$(id -u)" -eq 0 ]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
  fi
}
