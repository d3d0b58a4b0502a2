#!/usr/bin/env python3
# SPDX-License-Identifier: GPL-2.0
"""Preprocessor of mdBook: replaces each code block in the language dot (Graphviz) or msc (Mscgen) by its picture in SVG."""

import html
import json
import re
import subprocess
import sys

BLOCK = re.compile(r"^```(dot|msc)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMANDS = {"dot": ["dot", "-Tsvg"], "msc": ["mscgen", "-T", "svg", "-i", "-", "-o", "-"]}


def picture(block):
    """Returns the picture of a block as one element of HTML. A blank line would end the element in Markdown."""
    drawn = subprocess.run(COMMANDS[block[1]], input=block[2], capture_output=True, text=True, check=False)
    if drawn.returncode:
        sys.exit(f"{block[0]}\n{drawn.stderr}")
    svg = drawn.stdout[drawn.stdout.index("<svg"):]
    svg = "\n".join(line for line in svg.splitlines() if line.strip())
    title = html.escape(block[2].splitlines()[0].lstrip("# "))
    return f'<div class="picture" title="{title}">{svg}</div>\n'


def draw(items):
    """Draws the pictures of chapters and of the chapters within."""
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            chapter["content"] = BLOCK.sub(picture, chapter["content"])
            draw(chapter["sub_items"])


def main():
    # mdBook first asks whether a renderer is supported: the exit status answers.
    if sys.argv[1:2] == ["supports"]:
        return
    _, book = json.load(sys.stdin)
    draw(book["sections"])
    json.dump(book, sys.stdout)


main()
