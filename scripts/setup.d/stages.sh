# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# Stages of a build that runs once. Each stage leaves a stamp keyed by its inputs: a second run does no work,
# and a run after an interrupt resumes at the stage that was interrupted. The script that sources this file
# defines stage_NAME for each stage, and each_stage, which calls `$1 NAME INPUTS DESCRIPTION` for all in order.

# shellcheck source=scripts/lib.sh
. "$(dirname -- "${BASH_SOURCE[0]}")/../lib.sh"

stamps=$root/var/lib/kite
job=

key() { printf '%s' "$1" | sha256sum; }

# Succeeds if the stamp of a stage is that of these inputs.
current() { [ "$(cat "$stamps/$1" 2>/dev/null)" = "$(key "$2")" ]; }

stage() {
	if current "$1" "$2"; then return; fi
	run "$1" "$3"
	mkdir -p "$stamps"
	key "$2" >"$stamps/$1"
}

# run NAME DESCRIPTION: runs stage_NAME with its output in a log, and prints its time. For a NAME such as
# kernel-7.3, runs `stage_kernel 7.3`.
run() {
	local name=$1 what=$2 start=$SECONDS log=$cache/$1.log
	say "$name: $what (log: $log)"
	# A job has its own process group, so one signal ends all its processes. `set -e` is in effect in a
	# job; in a condition it is not.
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

# Prints the elapsed time: on a terminal a line that counts seconds, else a line per minute.
progress() {
	local shown=0 seconds
	while sleep 0.2 && kill -0 "$job" 2>/dev/null; do
		seconds=$((SECONDS - $2))
		if [ -t 2 ]; then
			printf '\r%s: %d s \r' "$1" "$seconds" >&2
		elif [ $((seconds / 60)) != "$shown" ]; then
			shown=$((seconds / 60))
			say "$1: running for $seconds s"
		fi
	done
}

interrupted() {
	trap - INT TERM HUP
	[ -z "$job" ] || kill -TERM -- "-$job" 2>/dev/null || true
	[ -z "$job" ] || wait "$job" 2>/dev/null || true
	die "interrupted" "Run it again: it resumes at the interrupted stage."
}

# Messages of debootstrap, apt and wget for an archive that cannot be reached. A log has other lines about
# names, connections and networks, so the patterns are anchored.
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
		echo "The package archive cannot be reached: check the network and proxy, then run this again."
	else
		echo "Read $1; running this again resumes at this stage."
	fi
}
