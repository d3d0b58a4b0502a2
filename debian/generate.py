#!/usr/bin/python3
# SPDX-License-Identifier: GPL-2.0
"""generate.py REVISION EPOCH ABI...: writes what of debian/ depends on the version and the kernels.

The control file gets a package for each kernel release ABI, newest first. The Debian change log is made
from CHANGELOG.md. Changes that are not released yet have the time EPOCH, in seconds since 1970.
"""

import re
import sys
import textwrap
from datetime import datetime, timezone
from email.utils import format_datetime
from pathlib import Path

DEBIAN = Path("debian")
SECTION = re.compile(r"^## \[(.+?)\](?: - (\S+))?$", re.MULTILINE)


def fill(template, **values):
    """Returns the text of a file of debian/ with its @NAMES@ replaced."""
    text = (DEBIAN / template).read_text()
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def write_modules(abis):
    """Writes the control file, and install lists and maintainer scripts of the module packages."""
    control = fill("control.in", NEWEST=abis[0])
    for abi in abis:
        control += fill("module.in", ABI=abi)
        package = f"kite-module-{abi}"
        (DEBIAN / f"{package}.install").write_text(
            f"usr/lib/modules/{abi}/updates/kite.ko\nusr/share/kite/{abi}.der\n"
        )
        for script in ("postinst", "postrm"):
            (DEBIAN / f"{package}.{script}").write_text(fill(f"module.{script}.in", ABI=abi))
    (DEBIAN / "control").write_text(control)


def items(section):
    """Returns the items of a section of CHANGELOG.md, each on one line with its heading's word first."""
    result, heading = [], ""
    for line in section.splitlines():
        if line.startswith("### "):
            heading = line[4:].strip()
        elif line.startswith("- "):
            result.append(f"{heading}: {line[2:]}")
        elif line.startswith("  ") and result:
            result[-1] += " " + line.strip()
    return result or ["No notable changes."]


def entry(version, when, section, maintainer):
    """Returns an entry of the Debian change log."""
    lines = [f"kite ({version}) trixie; urgency=medium", ""]
    for item in items(section):
        lines += textwrap.wrap(item, 78, initial_indent="  * ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines + ["", f" -- {maintainer}  {format_datetime(when)}", ""])


def write_changelog(revision, epoch):
    """Writes debian/changelog. The version of Cargo.toml must be the newest that CHANGELOG.md has, or newer."""
    current = re.search(r'^version = "(.+)"', Path("Cargo.toml").read_text(), re.MULTILINE)[1]
    maintainer = re.search(r"^Maintainer: (.+)", fill("control.in"), re.MULTILINE)[1]
    _, *parts = SECTION.split(Path("CHANGELOG.md").read_text())
    sections = list(zip(parts[0::3], parts[1::3], parts[2::3]))
    released = {version for version, _, _ in sections}
    entries = []
    for version, day, section in sections:
        when = datetime.fromtimestamp(epoch, timezone.utc)
        if day:
            when = datetime.fromisoformat(day).replace(tzinfo=timezone.utc)
        if version == "Unreleased":
            if current in released:
                continue
            # Lower than the version of the release, and higher than that of an earlier commit.
            version = current = f"{current}~{when:%Y%m%d.%H%M}"
        entries.append(entry(f"{version}-{revision if version == current else 1}", when, section, maintainer))
    if not entries[0].startswith(f"kite ({current}-"):
        sys.exit(f"CHANGELOG.md: the newest section is not that of version {current}")
    (DEBIAN / "changelog").write_text("\n".join(entries))


def main():
    revision, epoch, *abis = sys.argv[1:]
    write_modules(abis)
    write_changelog(revision, int(epoch))


main()
