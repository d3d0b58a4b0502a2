# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# Functions that scripts share: paths of the cache, messages, and commands in the root file system. A private
# mount namespace holds the bind mounts, so no mount is left after a crash.

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

# die ERROR REMEDY: prints both and exits with 1.
die() {
	printf '%s\n' "${red}kite: $1$plain" >&2
	printf '      %s\n' "$2" >&2
	exit 1
}

# choose KNOWN WANTED…: selects steps for is_chosen. Without WANTED all known steps are selected. An unknown
# name is an error: a mistyped name would otherwise select no step, and the run would succeed.
choose() {
	local name
	for name in "${@:2}"; do
		[[ " $1 " = *" $name "* ]] || die "unknown step \"$name\"" "Known steps: $1"
	done
	chosen=" ${*:2} "
}

is_chosen() { [[ "$chosen" = "  " || "$chosen" = *" $1 "* ]]; }

# Runs a command in the root, with the checkout at /kite and the host's /proc, /sys and /dev. The environment
# of the command has only TERM, the proxies and the variables of KITE_ENV ("A=b C=d").
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
