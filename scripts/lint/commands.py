#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Checks the commands of kite in the documents and manual pages. Runs in the root.

    commands.py target/debug    asks kite and kited in this folder for their commands and options

- A command line of kite or kited has a command that exists, and options of this command.
- An option in backticks, such as `--node`, is one of kite or kited.
- The page of a command that a manual page refers to exists.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
OPTION = re.compile(r"--?[a-zA-Z][\w-]*")
# Options of cargo and others.
FOREIGN = {"--test-threads"}


def commands_of(folder):
    """Returns the options of each command, by its words, such as ("kite", "bench", "rate")."""
    commands = {}
    with tempfile.TemporaryDirectory() as pages:
        subprocess.run([folder / "kite", "man", pages], check=True)
        for page in Path(pages).iterdir():
            options = re.findall(r"\\fB(--?[\w-]+)\\fR", page.read_text().replace("\\-", "-"))
            commands[tuple(page.stem.split("-"))] = set(options)
    usage = subprocess.run([folder / "kited", "--help"], check=True, capture_output=True, text=True).stdout
    found = re.findall(r"^ +(?:(-\w), )?(--[\w-]+)", usage, re.MULTILINE)
    commands["kited",] = {option for options in found for option in options}
    return commands


def code(path):
    """Yields (line number, text) of each span and line of code. A block in a language has no commands."""
    text = re.sub(r"^```\w.*?^```$", lambda block: "\n" * block[0].count("\n"), path.read_text(), flags=re.DOTALL | re.MULTILINE)
    within = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith(("```", ".Bd -literal", ".Ed")):
            within = not within
        elif within or line.startswith("    "):
            yield number, line.strip()
        elif path.suffix == ".md":
            yield from ((number, span) for span in re.findall(r"`([^`]+)`", line))
        elif line.startswith((".Ql ", ".Nm kite ")):
            yield number, line[4:]


def fault(commands, words):
    """Returns what is wrong with a command line, or None."""
    command, arguments = tuple(words[:1]), words[1:]
    while arguments and command + (arguments[0],) in commands:
        command += (arguments.pop(0),)
    if command == ("kite",) and arguments and not arguments[0].startswith("-"):
        return f"kite has no command {arguments[0]}"
    for argument in arguments:
        option = OPTION.match(argument)
        if option and option[0] not in commands[command]:
            return f"{' '.join(command)} has no option {option[0]}"
        if command == ("kite", "run") and not option:
            return None
    return None


def faults(commands, path):
    """Yields what is wrong with the commands in a document."""
    options = set().union(*commands.values()) | FOREIGN
    for number, text in code(path):
        for part in re.split(r"[|;&$(]", text):
            words = part.split()
            reason = fault(commands, words) if words[:1] in (["kite"], ["kited"]) else None
            if reason:
                yield f"{path.relative_to(TOP)}:{number}: {reason}"
        if text.startswith("--") and OPTION.match(text)[0] not in options:
            yield f"{path.relative_to(TOP)}:{number}: no option {text}"
    for page in re.findall(r"^\.Xr (kite[\w-]*) 1", path.read_text(), re.MULTILINE):
        if tuple(page.split("-")) not in commands:
            yield f"{path.relative_to(TOP)}: no page {page}(1)"
    if path.name == "kited.8":
        for option in re.findall(r"Fl Fl ([\w-]+)", path.read_text()):
            if f"--{option}" not in commands["kited",]:
                yield f"{path.relative_to(TOP)}: kited has no option --{option}"


def main():
    commands = commands_of(Path(sys.argv[1]))
    pages = sorted(page for page in (TOP / "docs").rglob("*") if re.fullmatch(r"\.(md|[3478])", page.suffix))
    others = [TOP / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    wrong = [reason for path in others + pages for reason in faults(commands, path)]
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(f"{len(wrong)} faulty commands" if wrong else 0)


main()
