# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# What is built once, is built in stages. Each leaves a stamp keyed by its inputs: a second run does
# nothing, and an interrupted one goes on where it stopped. Who uses this defines stage_NAME for each
# stage, and each_stage, which calls `$1 NAME INPUTS WHAT` for all of them in order.

# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/lib.sh"

stamps=$root/var/lib/kite
job=

key() { printf '%s' "$1" | sha256sum; }

# Whether the stamp of a stage says that these inputs were dealt with.
current() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$(key "$2")" ]; }

stage() {
	if current "$1" "$2"; then return; fi
	run "$1" "$3"
	mkdir -p "$stamps"
	key "$2" >"$stamps/$1"
}

# run NAME WHAT: runs stage_NAME with its output in a log, and shows the time it takes. For a NAME such as
# kernel-7.3 it runs `stage_kernel 7.3`.
run() {
	local name=$1 what=$2 start=$SECONDS log=$cache/$1.log
	say "$name: $what (log: $log)"
	# A job of its own: it can be ended with all that it started, and `set -e` holds in it, which it
	# would not in a condition.
	set -m
	(set -e; "stage_${name%%-*}" "${name##*-}") </dev/null >"$log" 2>&1 &
	job=$!
	set +m
	progress "$name" "$start"
	local status=0
	wait "$job" || status=$?
	job=
	if [ "$status" != 0 ]; then
		tail -n 15 "$log" >&2
		die "the stage '$name' failed" "$(remedy "$log")"
	fi
	say "$name: done in $((SECONDS - start)) s"
}

# On a terminal a line that counts the seconds, else one line a minute.
progress() {
	local shown=0 seconds
	while sleep 0.2 && kill -0 "$job" 2>/dev/null; do
		seconds=$((SECONDS - $2))
		if [ -t 2 ]; then
			printf '\r%s: %d s \r' "$1" "$seconds" >&2
		elif [ $((seconds / 60)) != "$shown" ]; then
			shown=$((seconds / 60))
			say "$1: still at it after $seconds s"
		fi
	done
}

interrupted() {
	trap - INT TERM HUP
	[ -z "$job" ] || kill -TERM -- "-$job" 2>/dev/null || true
	[ -z "$job" ] || wait "$job" 2>/dev/null || true
	die "interrupted" "Run it again: it goes on where it stopped."
}

# What debootstrap, apt and wget say of an archive that they did not reach. A log has much else that
# speaks of resolving, connections and networks.
unreached="^E: (Failed getting|Couldn't download|Failed to fetch|Unable to fetch) |^Err:[0-9]+ "
unreached+="|^W: Failed to fetch |^ +(Temporary failure resolving|Could not (resolve|connect)) "
unreached+="|^wget: unable to resolve |^(Resolving|Connecting to) .* failed: "

remedy() {
	if grep -qi 'no space left' "$1"; then
		echo "The disk is full: free some space, or set KITE_CACHE to a directory with room."
	elif grep -q 'kite-no-kernel' "$1"; then
		echo "Set KITE_KERNEL_SERIES to a series that the archive offers: apt-cache pkgnames linux-headers-"
	elif grep -qi 'noexec or nodev' "$1"; then
		echo "Set KITE_CACHE to a directory on a file system that allows programs and devices."
	elif grep -qE "$unreached" "$1"; then
		echo "The package archive was not reached: check the network and proxy, then run this again."
	else
		echo "Read $1; running this again resumes at this stage."
	fi
}
