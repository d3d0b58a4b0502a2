#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Checks comments, texts in string literals and documents for words that technical English does without.

    prose.py              checks all files but those under the paths in scripts/lint/prose-exempt, and the limits
    prose.py FILE…        checks these files
    prose.py --measure    prints, for comments of src/, words of each kind per 1000 words

CONTRIBUTING.md has the rules. Code, quotations in backticks and licence lines are not text. A string literal of Rust
with three words or more is text.
"""

import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]

# Kinds of words that --measure counts: the limit per 1000 words, and the words.
KINDS = {
    "persons": (0.5, r"who|whoever|whom|whose|somebody|someone|nobody|anybody|anyone|everybody|everyone|he|him|his|himself"),
    "speech verbs": (1, r"tells?|told|telling|hears?|heard|asks?|asked|asking|says?|said|saying|looks?|looked|looking|knows?|knew|known|knowing"),
    "archaic phrases": (0.5, r"by and by|in vain|anew|what (?:came|comes|becomes|became) of|no more|of late|now and then|as there|at all|so many|such a one"),
    "vague pronouns": (55, r"it|that|this|what|they|them|its|these|those"),
}

# Pattern, and what to write instead.
RULES = [
    (r"\b(?:who|whoever|whom|somebody|someone|nobody|anybody|he|him|his|himself)\b", "name the component"),
    (r"\b(?:tells?|told|hears?|heard|says|said|insists?|insisted)\b", "send, receive, publish, report, retry"),
    (r"\b(?:by and by|in vain|anew|of late|now and then|as there)\b", "state the condition or the number"),
    (r"\bno more\b", "write: no further, at most"),
    (r"\bwhat (?:came|comes|becomes|became) of\b", "write: the result of"),
    (r"\bgoes by\b|\bis to be\b", "use an active verb"),
]

# First words of documentation comments of Rust.
FIRST_WORD = re.compile(r"(?:What|Whether|How|Of|Who)\b")

RUST_OR_C = {".rs", ".c", ".h"}
HASHED = {".py", ".sh", ".toml", ""}
TEXT = {".md"}
MANUAL = {".3", ".4", ".7", ".8"}


def comments(path, source):
    """Yields (line number, text) of each line of a comment. The text of a documentation comment begins with '/// '."""
    if path.suffix in TEXT:
        fenced = False
        for number, line in enumerate(source.splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced and not line.startswith("    "):
                yield number, line
    elif path.suffix in MANUAL:
        yield from text_of_manual(source)
    elif path.suffix in RUST_OR_C:
        yield from comments_of_code(source)
    else:
        for number, line in enumerate(source.splitlines(), 1):
            found = re.match(r"\s*#(?!!)\s?(.*)", line)
            if found:
                yield number, found[1]


def text_of_manual(source):
    """Yields lines of text in a manual page: no macros but names and items of lists, no displays."""
    literal = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.startswith((".Bd", ".Ed")):
            literal = line.startswith(".Bd")
        elif not literal and (not line.startswith(".") or line.startswith((".Nd", ".It"))):
            yield number, line


# A comment, or what may contain its signs: a string, a raw string, a character.
TOKEN = re.compile(
    r'(?P<line>//[^\n]*)|(?P<block>/\*.*?\*/)|r(?P<h>#*)".*?"(?P=h)|(?P<string>"(?:\\.|[^"\\])*")|\'(?:\\.|[^\'\\\n])\'', re.DOTALL
)


def comments_of_code(source):
    fenced = False
    for found in TOKEN.finditer(source):
        number = source.count("\n", 0, found.start()) + 1
        if found["line"]:
            text = found[0]
            if re.match(r"//[/!]\s*```", text):
                fenced = not fenced
            elif not fenced:
                yield number, text if text.startswith("/// ") else text.lstrip("/!")
        elif found["string"] and len(found["string"].split()) > 2:
            for offset, line in enumerate(found["string"].splitlines()):
                yield number + offset, line.strip(' \\"')
        elif found["block"]:
            for offset, line in enumerate(found[0].splitlines()):
                yield number + offset, line.strip(" \t*/")


def prose(line):
    """Returns a line without licences, quoted code, and links."""
    if "SPDX-License-Identifier" in line:
        return ""
    return re.sub(r"`[^`]*`|\]\([^)]*\)|https?://\S+", "", line)


def files(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=TOP, check=True, capture_output=True, text=True)
    return [TOP / name for name in listed.stdout.splitlines()]


def is_text(path):
    return path.is_file() and not path.is_symlink() and path.suffix in RUST_OR_C | HASHED | TEXT | MANUAL


def check(path):
    """Prints each offence in a file. Returns their number."""
    offences = 0
    previous = ("", 0)
    for number, raw in comments(path, path.read_text(errors="replace")):
        line = prose(raw)
        reasons = [(found[0], advice) for rule, advice in RULES for found in re.finditer(rule, line, re.IGNORECASE)]
        starts = raw.startswith("/// ") and not (previous[0].startswith("///") and previous[1] == number - 1)
        if starts and FIRST_WORD.match(raw[4:]):
            reasons.append((raw[4:].split()[0], "begin with a noun, or with what the function does: Returns"))
        for word, advice in reasons:
            print(f'{path.relative_to(TOP)}:{number}: "{word}": {advice}')
        offences += len(reasons)
        previous = (raw, number)
    return offences


def measure():
    """Returns for each kind its limit, and the words of the kind per 1000 words in comments of src/."""
    text = " ".join(prose(line) for path in files("src") if is_text(path)
                    for _, line in comments(path, path.read_text()))
    words = len(re.findall(r"[A-Za-z][A-Za-z'-]*", text))
    for kind, (limit, pattern) in KINDS.items():
        found = len(re.findall(rf"\b(?:{pattern})\b", text, re.IGNORECASE))
        yield kind, limit, 1000 * found / words


def main():
    arguments = sys.argv[1:]
    if arguments == ["--measure"]:
        for kind, limit, found in measure():
            print(f"{found:6.1f}  {kind} (limit {limit})")
        return
    chosen = [Path(name).resolve() for name in arguments]
    if not chosen:
        listed = (TOP / "scripts/lint/prose-exempt").read_text().split()
        exempt = [TOP / name for name in listed if not name.startswith("#")]
        chosen = [path for path in files() if not any(path.is_relative_to(other) for other in exempt)]
        for kind, limit, found in measure():
            if found > limit:
                sys.exit(f"{kind}: {found:.1f} of 1000 words in comments of src/, more than {limit}")
    offences = sum(check(path) for path in chosen if is_text(path))
    if offences:
        sys.exit(f"{offences} offences; CONTRIBUTING.md has the rules")


main()
