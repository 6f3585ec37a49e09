#!/usr/bin/env bash
# Runs one of the repository's scripts where nothing is installed: a new minimal Debian or Ubuntu in a folder, holding
# a clone of HEAD (uncommitted work is left out on purpose: users do not have it). Needs root.
#   scripts/run_in_bare_root.sh scripts/test.sh --fast
#   scripts/run_in_bare_root.sh --keep scripts/quickstart.sh     keeps the folder and prints where it is
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

usage() {
  cat <<TXT
usage: scripts/run_in_bare_root.sh [--keep] SCRIPT [ARGUMENTS]
Makes a new minimal Debian or Ubuntu in a folder, clones HEAD into it and runs SCRIPT there, as root.
  --keep   leave the folder behind and print where it is
TXT
}

keep=0
case "${1:-}" in --help | -h) usage && exit 0 ;; esac
if [ "${1:-}" = --keep ]; then
  keep=1
  shift
fi
[ $# -ge 1 ] || die "name the script to run, e.g.: $0 scripts/test.sh --fast"
[ "$(id -u)" -eq 0 ] || die "making a root file system needs root: run me with sudo."
have apt-get || die "this system has no apt-get: run me on Debian or Ubuntu."
have git || die "git is missing: install it and run me again."
if ! have mmdebstrap; then
  say "Installing mmdebstrap"
  apt-get -qq update </dev/null
  DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends mmdebstrap </dev/null >/dev/null
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/qeffect-bare.XXXXXX")
bare="$work/root"
# Mounts live in the mount namespace of the run below and are gone before this removes the folder.
if [ "$keep" = 0 ]; then trap 'rm -rf --one-file-system "$work"' EXIT; fi

# This machine's release, mirrors and download settings (a proxy, say), read now and written nowhere else.
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
apt-config dump | grep -E '^Acquire::(http|https|ftp|Check|Retries|ForceIPv)' >"$work/apt.conf" || true
mapfile -t mirrors < <(grep -lsE "(^|[ /])$release([- ]|$)" /etc/apt/sources.list /etc/apt/sources.list.d/*.sources \
  /etc/apt/sources.list.d/*.list)

say "Making a minimal $release in $bare"
SECONDS=0
mmdebstrap --quiet --variant=minbase --aptopt="$work/apt.conf" "$release" "$bare" "${mirrors[@]}"
cp -L /etc/resolv.conf /etc/hosts "$bare/etc/"
git clone --quiet --no-hardlinks "$ROOT" "$bare/srv/qeffect"
echo "made in $SECONDS s"

say "Running $* in it"
SECONDS=0
status=0
# A namespace of its own: when the script ends, every process it left and every mount end too.
# shellcheck disable=SC2016  # the inner shells expand these
unshare --mount --pid --fork --kill-child bash -euc '
  bare=$1
  shift
  mount -t proc proc "$bare/proc"
  mount --rbind /dev "$bare/dev"
  mount --rbind /sys "$bare/sys"
  exec chroot "$bare" env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" \
    bash -c "cd /srv/qeffect && exec bash \"\$@\"" bash "$@"
' bash "$bare" "$@" </dev/null || status=$?
say "$1 ended with status $status after $SECONDS s"
if [ "$keep" = 1 ]; then echo "kept: $bare"; fi
exit "$status"
