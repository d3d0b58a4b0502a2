# SPDX-License-Identifier: GPL-2.0
# shellcheck shell=bash
#
# Selection of kernel series and versions from the package names that an archive offers.
#
# offered_versions and select_series read package names from standard input, one a line, and have no
# other input, so that tests run them on archives of their own.

# offered_versions SERIES: prints the kernel versions of the series for which headers are offered,
# oldest first.
offered_versions() {
	sed -nE "s/^linux-headers-(${1//./\\.}\.[0-9]+)\+deb13-amd64\$/\1/p" | sort -V
}

# select_series SERIES…: prints those of the series that are offered, in the order given, on one line.
select_series() {
	local names series selected=()
	names=$(cat)
	for series; do
		[ -z "$(offered_versions "$series" <<<"$names")" ] || selected+=("$series")
	done
	echo "${selected[*]}"
}
