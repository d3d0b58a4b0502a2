# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# What the scripts share: where the cache is, how they speak, and how a command enters the root file
# system. A private mount namespace holds the bind mounts, so nothing stays mounted after a crash.

top=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
cache=${KITE_CACHE:-${XDG_CACHE_HOME:-${HOME:-/root}/.cache}/kite}
root=$cache/root
# shellcheck source=scripts/kernel
. "$top/scripts/kernel"

bold='' red='' plain=''
if [ -t 2 ]; then
	bold=$'\033[1m' red=$'\033[1;31m' plain=$'\033[0m'
fi

say() { printf '%s\n' "${bold}kite:$plain $*" >&2; }

# die WHAT REMEDY
die() {
	printf '%s\n' "${red}kite: $1$plain" >&2
	printf '      %s\n' "$2" >&2
	exit 1
}

# choose KNOWN WANTED…: what is to be done of what can be, all of it if nothing is named. A name that is
# mistyped is refused: nothing would be done for it, and all be well.
choose() {
	local name
	for name in "${@:2}"; do
		[[ " $1 " = *" $name "* ]] || die "there is no \"$name\" here" "There are: $1"
	done
	chosen=" ${*:2} "
}

is_chosen() { [[ "$chosen" = "  " || "$chosen" = *" $1 "* ]]; }

# Runs a command in the root, with the checkout at /kite and the host's /proc, /sys and /dev. Of the
# environment only the terminal, proxies, and KITE_ENV ("A=b C=d") come along.
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
		keep=("TERM=${TERM:-dumb}")
		for name in http_proxy https_proxy no_proxy; do
			[ -z "${!name:-}" ] || keep+=("$name=${!name}")
		done
		exec chroot . /usr/bin/env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
			"${keep[@]}" LANG=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
			${KITE_ENV:-} bash -c "cd /kite && exec \"\$@\"" bash "$@"
	' bash "$root" "$top" "$@"
}
