#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Checks the links of the documents: README.md, CONTRIBUTING.md, CHANGELOG.md, SECURITY.md and pages of docs/.

    links.py              checks the sources
    links.py target/book  checks the pages that mdBook made: the file and the anchor of each relative link exist

- The file of a relative link exists, and an anchor is a heading of the file.
- A page of docs/ links to pages of docs/ only: the book has no other files.
- docs/SUMMARY.md lists each page of docs/.
- A path of the sources in backticks, such as `src/params.rs`, exists.

Links to other sites are not followed. Code is not text.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
DOCS = TOP / "docs"
SUMMARY = DOCS / "SUMMARY.md"

LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"#{1,6}\s+(.*?)\s*#*$")
EXTERNAL = re.compile(r"[a-z][a-z0-9+.-]*:")
SOURCE = re.compile(r"`((?:c-shim|debian|docs|include|scripts|src|tests|userlib)/[\w./-]+)`")


def text_lines(path):
    """Yields (line number, line) outside of fenced code."""
    fenced = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def anchors(path):
    """Returns the anchors of a page: GitHub and mdBook derive the same ones from its headings."""
    seen, found = {}, set()
    for _, line in text_lines(path):
        heading = HEADING.match(line)
        if not heading:
            continue
        title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
        slug = re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title.lower()))
        count = seen.get(slug, 0)
        seen[slug] = count + 1
        found.add(f"{slug}-{count}" if count else slug)
    return found


def links(path):
    """Yields (line number, target) of each link of a page."""
    for number, line in text_lines(path):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            yield number, target


def missing_sources(path):
    """Yields (line number, path) of each named source that does not exist."""
    for number, line in text_lines(path):
        for source in SOURCE.findall(line):
            if not (TOP / source).exists():
                yield number, source


def fault(path, target):
    """Returns what is wrong with a link of a page, or None."""
    if EXTERNAL.match(target):
        return None
    name, _, anchor = target.partition("#")
    file = (path.parent / name).resolve() if name else path
    if not file.exists():
        return "no such file"
    if path.is_relative_to(DOCS) and not file.is_relative_to(DOCS):
        return "the book has no such file: name the path in backticks"
    if anchor and anchor not in anchors(file):
        return "no such heading"
    return None


class Page(HTMLParser):
    """Anchors and links of a page of the book."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.links = set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        for name, value in attrs:
            if name == "id":
                self.ids.add(value)
            elif name in ("href", "src", "xlink:href"):
                self.links.append((self.getpos()[0], value))


def book_faults(book):
    """Yields the faulty links of a book. Debian's mdBook has no fonts: browsers use those of the system."""
    pages = {path: Page(path) for path in sorted(book.resolve().rglob("*.html"))}
    for path, page in pages.items():
        for number, target in page.links:
            name, _, anchor = target.partition("#")
            file = (path.parent / name).resolve() if name else path
            if EXTERNAL.match(target) or name == "fonts/fonts.css":
                continue
            if not file.exists():
                yield f"{path.name}:{number}: {target}: no such file"
            elif anchor and file in pages and anchor not in pages[file].ids:
                yield f"{path.name}:{number}: {target}: no such heading"


def source_faults():
    """Yields the faulty links of the sources, and pages that the summary lacks."""
    pages = sorted(DOCS.rglob("*.md"))
    others = [TOP / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
    for path in others + pages:
        for number, target in links(path):
            reason = fault(path, target)
            if reason:
                yield f"{path.relative_to(TOP)}:{number}: {target}: {reason}"
        if path.name != "CHANGELOG.md":
            for number, source in missing_sources(path):
                yield f"{path.relative_to(TOP)}:{number}: {source}: no such file"
    listed = {(DOCS / target).resolve() for _, target in links(SUMMARY)}
    for page in pages:
        if page not in listed | {SUMMARY}:
            yield f"docs/SUMMARY.md: {page.relative_to(DOCS)} is missing"


def main():
    wrong = list(book_faults(Path(sys.argv[1])) if sys.argv[1:] else source_faults())
    print("\n".join(wrong), end="\n" if wrong else "")
    sys.exit(f"{len(wrong)} faulty links" if wrong else 0)


main()
