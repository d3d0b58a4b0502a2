# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# What the scripts share: where the cache is, how they speak, and how a command enters the root file
# system. A private mount namespace holds the bind mounts, so nothing stays mounted after a crash.

top=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cache=${KITE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/kite}
root=$cache/root
# shellcheck source=scripts/kernel
. "$top/scripts/kernel"

say() { printf '\033[1mkite:\033[0m %s\n' "$*" >&2; }

# die WHAT REMEDY
die() {
	printf '\033[1;31mkite: %s\033[0m\n' "$1" >&2
	printf '      %s\n' "${2:-}" >&2
	exit 1
}

# Runs a command in the root, with the checkout at /kite and the host's /proc, /sys and /dev.
enter() {
	unshare --mount --propagation private -- bash -c '
		set -e
		root=$1 top=$2; shift 2
		mount --bind "$root" "$root"
		mount --rbind /dev "$root/dev"
		mount --bind /proc "$root/proc"
		mount --bind /sys "$root/sys"
		mkdir -p "$root/kite"
		mount --bind "$top" "$root/kite"
		cd "$root"
		exec chroot . /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
			TERM="${TERM:-dumb}" LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
			${KITE_ENV:-} bash -c "cd /kite && exec \"\$@\"" bash "$@"
	' bash "$root" "$top" "$@"
}
