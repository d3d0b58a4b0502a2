#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Checks the layout of the sources: imports of Rust, sizes of files and of folders.

    layout.py            prints violations, and fails if there are any
    layout.py --graph    prints the imports between the files of src/, one in a line

Violations are imports of src/ from a lower layer to a higher one, cycles of imports in the module and in userlib/,
source files with more than MAX_LINES lines, and folders with more than MAX_FILES files.

An import is a path in a `use` declaration, or a qualified path in code. A parent that declares a module does
not import it. Test modules (tests.rs, tests/) may import anything.
"""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
MAX_LINES = 450
MAX_FILES = 15

# ABI headers define one interface each, so they may be long.
LONG = {"include/kite.h", "include/uapi/kite.h"}

# The packaging format prescribes the files of this folder.
PRESCRIBED = "debian"

SOURCES = {".rs", ".c", ".h", ".py", ".sh"}

# Start of a script without a suffix: an interpreter, or the shell of a file that other scripts source.
SCRIPT = re.compile(r"#!.*\b(?:sh|bash|python3)\b|(?:.*\n){0,3}# shellcheck shell=")

# Folder or file of src/, and what it must not import.
NEVER = {
    "core": "sys verbs mlx5 fabric cluster control region rpc vqp session rnic",
    "sys": "verbs mlx5 fabric cluster control region rpc vqp session rnic",
    "verbs": "mlx5 fabric cluster control region rpc vqp session rnic",
    "mlx5": "fabric cluster control region rpc vqp session rnic",
    "fabric": "cluster control region rpc vqp session rnic",
    "cluster": "mlx5 control region rpc vqp session rnic",
    "control": "mlx5 verbs region rpc vqp session rnic",
    "region": "mlx5 rpc vqp session rnic",
    "rpc": "mlx5 vqp session rnic",
    "vqp": "rpc session",
}

# Folders of src/ that know no type of kite.
GENERIC = ["mlx5", "verbs"]

# Crates: the folder with the root file, and the root file.
ROOTS = {"src": "kite_main.rs", "src/core": "lib.rs"} | {
    f"userlib/{name}/src": root
    for name, root in {"kite": "lib.rs", "cli": "main.rs", "kited": "main.rs", "libkite": "lib.rs", "libkite-verbs": "lib.rs"}.items()
}

IGNORED = re.compile(r'//[^\n]*|/\*.*?\*/|r(#*)".*?"\1|"(?:\\.|[^"\\])*"', re.DOTALL)
USE = re.compile(r"\buse\s+([^;]+);")
PATH = re.compile(r"\b(?:crate|super|self)(?:::\w+)+")


class Crate:
    """Modules of a crate, by their paths: tuples of names."""

    def __init__(self, folder, root):
        self.folder = TOP / folder
        self.modules = {}
        others = [TOP / other for other in ROOTS if other != folder and other.startswith(folder)]
        for path in sorted(self.folder.rglob("*.rs")):
            if any(path.is_relative_to(other) for other in others):
                continue
            parts = path.relative_to(self.folder).with_suffix("").parts
            if parts[-1] == "mod":
                parts = parts[:-1]
            self.modules[() if path.name == root and len(parts) == 1 else parts] = path

    def module_of(self, path):
        """Returns the longest module that the path begins with."""
        while path not in self.modules:
            path = path[:-1]
        return path

    def imports(self, module):
        """Returns the modules that a module imports."""
        code = IGNORED.sub('""', self.modules[module].read_text())
        paths = [leaf for tree in USE.findall(code) for leaf in leaves(tree)] + PATH.findall(code)
        resolved = (self.resolve(module, path) for path in paths)
        return {other for other in resolved if other is not None} - {module}

    def resolve(self, module, path):
        """Returns the module of a path written in a module, or None if it is of another crate."""
        names = [name.strip() for name in path.split(" as ")[0].split("::")]
        if names[0] == "crate":
            return self.module_of(tuple(names[1:]))
        if names[0] not in ("super", "self"):
            own = module + tuple(names[:1])
            return self.module_of(module + tuple(names)) if own in self.modules else None
        base = module
        while names[0] in ("super", "self"):
            base = base[:-1] if names.pop(0) == "super" else base
            if not names:
                break
        return self.module_of(base + tuple(names))


def leaves(tree):
    """Returns the paths in a use tree, such as a::{b, c::d}."""
    tree = tree.strip()
    brace = tree.find("{")
    if brace < 0:
        return [tree]
    prefix, depth, start, found = tree[:brace], 0, brace + 1, []
    for at in range(brace, len(tree)):
        if tree[at] == "{":
            depth += 1
        elif tree[at] == "}":
            depth -= 1
        if (tree[at] == "," and depth == 1) or depth == 0:
            if tree[start:at].strip():
                found.append(tree[start:at])
            start = at + 1
        if depth == 0:
            break
    return [re.sub(r"::self$", "", prefix + leaf) for branch in found for leaf in leaves(branch)]


def cycles(graph):
    """Returns the sets of more than one file that import each other (Tarjan)."""
    index, low, stack, found = {}, {}, [], []

    def visit(node):
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == index[node]:
            component = stack[stack.index(node):]
            del stack[stack.index(node):]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return found


def name(module):
    return "/".join(module) or "(root)"


def is_test(module):
    return "tests" in module


def graph_of(crate):
    """Returns what each file imports, but for tests, and for what a module's own file defines for its parts."""
    return {
        module: {other for other in crate.imports(module) if module[: len(other)] != other and not is_test(other)}
        for module in crate.modules
        if not is_test(module)
    }


def check_layers():
    """Yields imports of src/ from a lower layer to a higher one."""
    for module, others in graph_of(Crate("src", ROOTS["src"])).items():
        forbidden = NEVER.get(module[0] if module else "", "").split()
        for other in sorted(others):
            if other[0] in forbidden:
                yield f"src/{name(module)} must not import {name(other)}"
    for path in (path for folder in GENERIC for path in sorted((TOP / "src" / folder).rglob("*.rs"))):
        if "use kite_core" in path.read_text():
            yield f"{path.relative_to(TOP)} must not import kite_core"


def check_cycles():
    """Yields files that import each other."""
    for folder, root in ROOTS.items():
        for component in cycles(graph_of(Crate(folder, root))):
            yield f"{folder}: these files import each other: {', '.join(sorted(map(name, component)))}"


def is_source(path):
    """Returns True for a source by its suffix, and for a script by its first lines."""
    if path.suffix:
        return path.suffix in SOURCES
    return SCRIPT.match(path.read_text(errors="replace")) is not None


def check_sizes():
    """Yields source files with too many lines, and folders with too many files."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=TOP, check=True, capture_output=True, text=True).stdout.splitlines()
    names = [name for name in sorted(set(listed)) if (TOP / name).is_file() and Path(name).parts[0] != PRESCRIBED]
    for name in names:
        if name not in LONG and is_source(TOP / name):
            lines = (TOP / name).read_text().count("\n")
            if lines > MAX_LINES:
                yield f"{name} has {lines} lines, of at most {MAX_LINES}"
    for folder, count in sorted(Counter(Path(name).parent for name in names).items()):
        if count > MAX_FILES:
            yield f"{folder} has {count} files, of at most {MAX_FILES}"


def main():
    if sys.argv[1:] == ["--graph"]:
        crate = Crate("src", ROOTS["src"])
        for module in crate.modules:
            for other in sorted(crate.imports(module)):
                print(f"{name(module)} {name(other)}")
        return
    wrong = [*check_layers(), *check_cycles(), *check_sizes()]
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(f"{len(wrong)} faults of the layout" if wrong else 0)


main()
