#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Compares the manual pages and the documents with the sources.

- Each function of libkite is in NAME of a page of section 3, and its prototype there is the one of the header.
- A structure in a page of section 3 has the members of the header.
- docs/kernel-api.md names each function of include/kite.h.
- kite.4 lists each ioctl of include/uapi/kite.h, and each parameter of the module with its default.
- docs/development/architecture.md lists each lock of the module by the name that lockdep shows.
- docs/operations.md lists each counter of include/uapi/kite.h, and each log message of the module and of kited.

Tests of kited compare its options with kited.8, and scripts/describe writes the pages of the command.
"""

import re
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
LIBRARY = ["userlib/include/kite/lite.h", "userlib/include/kite/krcore.h"]
KERNEL = ["include/kite.h"]

PROTOTYPE = re.compile(r"^(\w[\w ]*?[ *]+)(\w+)(\([^{;]*\));", re.MULTILINE)
STRUCTURE = re.compile(r"^struct (\w+) \{\n(.*?)^\};", re.DOTALL | re.MULTILINE)
SYNOPSIS = re.compile(r"^\.Sh SYNOPSIS\n(.*?)^\.Sh ", re.DOTALL | re.MULTILINE)
FUNCTION = re.compile(r'^\.Ft (.*)\n(?:\.Fn (\w+) (.*)|\.Fo (\w+)\n((?:\.Fa ".*"\n)*)\.Fc)$', re.MULTILINE)
PARAMETER = re.compile(r"^        (\w+): \w+ \{\n\s+default: (\d+),", re.MULTILINE)
# A log message: the format after the device, or after the fields of an event.
MODULE_MESSAGE = re.compile(r'\brnic_(?:err|warn|info|debug)!\(\s*[^;]*?,\s*(".*?")[,)\s]', re.DOTALL)
DAEMON_MESSAGE = re.compile(r'\btracing::(?:info|warn|error)!\((?:[^";]*?)(".*?[^\\]")\s*[,)]', re.DOTALL)
ITEM = re.compile(r"^\.It Cm (\w+)\n(.*?)(?=^\.(?:It|El))", re.DOTALL | re.MULTILINE)


def squeezed(text):
    """Returns a prototype without optional white space."""
    return re.sub(r"\s*([*(),])\s*", r"\1", " ".join(text.split()))


def code(text):
    """Returns C without comments."""
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def declared(headers):
    """Returns the prototype of each function of the headers, by its name."""
    text = "".join(code((TOP / name).read_text()) for name in headers)
    return {found[2]: squeezed(found[0].rstrip(";")) for found in PROTOTYPE.finditer(text)}


def structures(text):
    """Returns the members of each structure of a header or a page, by its name."""
    return {name: squeezed(members) for name, members in STRUCTURE.findall(code(text))}


def documented(page):
    """Returns the prototype of each function in the SYNOPSIS of a page, by its name."""
    functions = {}
    for found in FUNCTION.finditer(SYNOPSIS.search(page)[1]):
        name = found[2] or found[4]
        arguments = re.findall(r'"([^"]*)"', found[3] or found[5]) or ["void"]
        functions[name] = squeezed(f"{found[1]} {name}({','.join(arguments)})")
    return functions


def library_faults():
    pages = [path.read_text() for path in (TOP / "docs").rglob("*.3")]
    names = {name for page in pages for name in re.findall(r"^\.Nm (\w+)", page, re.MULTILINE)}
    header, manual = declared(LIBRARY), {}
    for page in pages:
        manual |= documented(page)
    for name in sorted(header.keys() | manual.keys() | names):
        if name not in names:
            yield f"{name}: in NAME of no page"
        if header.get(name) != manual.get(name):
            yield f"{name}: the header has {header.get(name)}, the page {manual.get(name)}"
    members = structures("".join((TOP / name).read_text() for name in LIBRARY))
    for page in pages:
        for name, found in structures(page).items():
            if found != members.get(name):
                yield f"struct {name}: the header has {members.get(name)}, the page {found}"


def kernel_faults():
    page = (TOP / "docs/kernel-api.md").read_text()
    for name in declared(KERNEL):
        if not re.search(rf"\b{name}\(", page):
            yield f"{name}: not in docs/kernel-api.md"


def device_faults():
    page = next((TOP / "docs").rglob("kite.4")).read_text()
    header = (TOP / "include/uapi/kite.h").read_text()
    for name in re.findall(r"#define (KITE_IOC_\w+) _IO", header):
        if not re.search(rf"\b{name}\b", page):
            yield f"{name}: not in kite.4"
    for name in set(re.findall(r"KITE_IOC_\w+", page)) - set(re.findall(r"KITE_IOC_\w+", header)):
        yield f"{name}: in kite.4 only"
    items = dict(ITEM.findall(page))
    parameters = dict(PARAMETER.findall((TOP / "src/kite_main.rs").read_text()))
    for name in sorted(items.keys() | parameters.keys()):
        default = parameters.get(name)
        if f"(default {default})" not in items.get(name, "") or f"Cm {name} Ns = Ns" not in page:
            yield f"{name}: kite.4 does not describe the parameter with its default, {default}"


def messages(folder, pattern):
    """Returns the longest constant part of each log message of the sources of a folder."""
    text = "".join(path.read_text() for path in sorted((TOP / folder).rglob("*.rs")))
    for found in pattern.findall(text):
        parts = re.split(r"\{[^}]*\}|\\n", re.sub(r"\\\n\s*", "", found).strip('"'))
        # Objects that leak share one row of the table.
        yield re.sub(r"^(?:QP|CQ|mkey|RMP) (?=cannot be destroyed: memory)", "MR ", max(parts, key=len).strip())


def operations_faults():
    page = (TOP / "docs/operations.md").read_text()
    header = (TOP / "include/uapi/kite.h").read_text()
    counters = re.search(r"^struct kite_stats \{\n(.*?)^\};", header, re.DOTALL | re.MULTILINE)[1]
    for name in re.findall(r"^\t__u64 (\w+);", counters, re.MULTILINE):
        if not re.search(rf"^\|[^|]*`{name}`", page, re.MULTILINE):
            yield f"{name}: a counter that docs/operations.md does not list"
    for message in {*messages("src", MODULE_MESSAGE), *messages("userlib/kited/src", DAEMON_MESSAGE)}:
        if message and message not in page:
            yield f'"{message}": a log message that docs/operations.md does not list'


def lock_faults():
    page = (TOP / "docs/development/architecture.md").read_text()
    text = "".join(path.read_text() for path in sorted((TOP / "src").rglob("*.rs")))
    for kind, field in sorted(set(re.findall(r'new_(?:mutex|spinlock)!\([^;]*?"(\w+)::(\w+)"', text))):
        row = rf"^\|(?:[^|]*)`(?:{kind}::)?{field}`[^|]*\|"
        if not re.search(row, page, re.MULTILINE):
            yield f"{kind}::{field}: a lock that docs/development/architecture.md does not list"


def main():
    wrong = [*library_faults(), *kernel_faults(), *device_faults(), *lock_faults(), *operations_faults()]
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(f"{len(wrong)} differences" if wrong else 0)


main()
