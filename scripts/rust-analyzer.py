#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Writes rust-project.json, from which rust-analyzer knows the module and kite_core.

The kernel's own generator describes its crates, and finds those of a module only if their roots are
beside a Kbuild. So this adds ours to what it wrote. It runs inside the root file system, where the
checkout is /kite; the paths that it writes are the host's: those under /kite, and all others under
the root, which are its arguments.
"""

import json
import os
import sys

TOP = "/kite"
KERNELS = TOP + "/build/rust-project.json"
SYSROOT = TOP + "/build/sysroot"


def add(crates, name, root, deps, **more):
    """Adds a crate like those that the kernel's generator makes; deps are names of crates."""
    numbers = {crate["display_name"]: number for number, crate in enumerate(crates)}
    kernel = crates[numbers["kernel"]]
    crates.append(
        {
            "display_name": name,
            "root_module": root,
            "is_workspace_member": True,
            "deps": [{"crate": numbers[dep], "name": dep} for dep in deps],
            "cfg": kernel["cfg"] + ["MODULE"],
            "edition": "2021",
            "env": {"RUST_MODFILE": "This is only for rust-analyzer"},
        }
        | more
    )


def add_ours(crates):
    add(crates, "kite_core", TOP + "/src/core/lib.rs", ["core"])
    generated = TOP + "/build/src"
    add(
        crates,
        "kite",
        TOP + "/src/kite_main.rs",
        ["core", "kernel", "pin_init", "macros", "ffi", "kite_core"],
        env={"RUST_MODFILE": "kite", "KITE_OBJ": generated},
        source={"include_dirs": [TOP + "/src", generated], "exclude_dirs": []},
    )


def write_sysroot(root):
    """Lets the host run the root's compiler and its server of macros: macros that one compiler built
    cannot be used by another."""
    programs = {"bin/rustc": " --sysroot=" + root + "/usr", "libexec/rust-analyzer-proc-macro-srv": ""}
    for program, options in programs.items():
        path = SYSROOT + "/" + program
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w") as file:
            file.write(
                "#!/bin/sh\n"
                f"exec {root}/lib64/ld-linux-x86-64.so.2 --library-path {root}/usr/lib/x86_64-linux-gnu"
                f' {root}/usr/{program}{options} "$@"\n'
            )
        os.chmod(path, 0o755)


def paths(value):
    """All absolute paths in a value."""
    if isinstance(value, dict):
        return [path for item in value.values() for path in paths(item)]
    if isinstance(value, list):
        return [path for item in value for path in paths(item)]
    return [value] if isinstance(value, str) and value.startswith("/") else []


def translated(value, top, root):
    """The same value with the host's paths."""
    if isinstance(value, dict):
        return {key: translated(item, top, root) for key, item in value.items()}
    if isinstance(value, list):
        return [translated(item, top, root) for item in value]
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    if value == TOP or value.startswith(TOP + "/"):
        return top + value[len(TOP) :]
    return root + value


def main():
    top, root = sys.argv[1:]
    with open(KERNELS) as file:
        project = json.load(file)
    add_ours(project["crates"])
    write_sysroot(root)
    project["sysroot"] = SYSROOT
    missing = [path for path in paths(project) if not os.path.exists(path)]
    if missing:
        sys.exit("rust-analyzer.py: these do not exist: " + " ".join(missing))
    with open(TOP + "/rust-project.json", "w") as file:
        json.dump(translated(project, top, root), file, indent=1)


if __name__ == "__main__":
    main()
