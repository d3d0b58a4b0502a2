#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Compiles the C samples of README.md, the pages of docs/ and docs/man. Runs in the root.

A sample of kernel code (it calls kite_*) is compiled by the kernel's build, other samples by gcc with the headers of
libkite. Statements outside of functions become the body of a function, and the names of CONTEXT are declared. Samples
in Rust are compiled by tests/workload.
"""

import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
OUT = TOP / "build/samples"

FENCED = re.compile(r"^```c\n(.*?)^```$", re.DOTALL | re.MULTILINE)
DISPLAY = re.compile(r"^\.Bd -literal.*?\n(#include.*?)^\.Ed$", re.DOTALL | re.MULTILINE)
FUNCTION = re.compile(r"^\w[^;=\n]*\)\n\{\n.*?^\}\n", re.DOTALL | re.MULTILINE)

USER_CONTEXT = "#include <kite/krcore.h>\n#include <kite/lite.h>\n"

# What the samples of docs/kernel-api.md take from the modules in tests/module.
KERNEL_CONTEXT = """
#include <linux/completion.h>
#include <linux/kthread.h>
#include <linux/string.h>
#include <linux/vmalloc.h>
#include <kite.h>

enum { MAX_DATA_BYTES = 8128, STOP_POLL_MS = 100, TIMEOUT_MS = 1000, QUEUE_ENTRIES = 8 };
enum { REQUEST_BYTES = 64, MEMORY_BYTES = 4096, WORD_OFFSET = 8, LEN = 64 };

extern struct kite_session *session;
extern struct completion done;
extern const char *name;
extern void *memory, *data, *copy, *buf, *reply;
extern size_t len, reply_len;
extern u64 handle, number, generation, lock, tag, vqp;
extern u32 node, port, count, key, lent_key;
extern int err;
void invert(void *buf, size_t len);
void release(void *context);
"""


def samples():
    """Yields (name, code) of each sample. The name has the document and the number of the line."""
    for path in [TOP / "README.md", *sorted((TOP / "docs").rglob("*.md")), *sorted((TOP / "docs").rglob("*.3"))]:
        source = path.read_text()
        for found in (FENCED if path.suffix == ".md" else DISPLAY).finditer(source):
            code = found[1] if path.suffix == ".md" else found[1].replace("\\e", "\\")
            line = source.count("\n", 0, found.start(1)) + 1
            yield path.relative_to(TOP), line, code


def unit(context, path, line, code):
    """Returns a sample as a C file. Errors have the lines of the document."""
    blank = FUNCTION.sub(lambda found: "\n" * found[0].count("\n"), code)
    functions = "".join(f'#line {line + code.count(chr(10), 0, found.start())} "{path}"\n{found[0]}'
                        for found in FUNCTION.finditer(code))
    if "#include" in code or not blank.strip():
        return f'{context}#line {line} "{path}"\n{code}'
    return f'{context}{functions}int sample(void);\nint sample(void)\n{{\n#line {line} "{path}"\n{blank}return 0;\n}}\n'


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    kernel, failed = [], 0
    for number, (path, line, code) in enumerate(samples()):
        file = OUT / f"sample{number}.c"
        if re.search(r"\bkite_\w+\(", code):
            file.write_text(unit(KERNEL_CONTEXT, path, line, code))
            kernel.append(file.with_suffix(".o").name)
            continue
        file.write_text(unit(USER_CONTEXT, path, line, code))
        options = ["-fsyntax-only", "-Wall", "-Werror", "-Wno-unused", f"-I{TOP}/userlib/include"]
        failed |= subprocess.run(["gcc", *options, file], check=False).returncode
    (OUT / "Kbuild").write_text(f"obj-m := {' '.join(kernel)}\nccflags-y := -I{TOP}/include -Werror -Wno-unused\n")
    make = ["make", "-s", "-C", "/usr/src/kite-linux", f"M={OUT}", "CROSS_COMPILE=x86_64-linux-gnu-", "HOSTCC=gcc-14"]
    failed |= subprocess.run([*make, *kernel], check=False).returncode
    sys.exit("a sample does not compile" if failed else 0)


main()
