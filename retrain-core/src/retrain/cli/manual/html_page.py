"""Markdown as one standalone HTML page: escaped, without scripts or external resources."""

from __future__ import annotations

import re
from html import escape
from itertools import pairwise

from markdown_it.token import Token

from retrain.cli.manual.man_page import parser

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.55 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
pre {{ padding: .8rem; overflow-x: auto; background: color-mix(in srgb, currentColor 7%, transparent); }}
code {{ font-family: ui-monospace, monospace; font-size: .92em; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
th, td {{ border: 1px solid color-mix(in srgb, currentColor 25%, transparent); padding: .25rem .5rem; }}
th {{ text-align: left; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid; }}
nav {{ columns: 12rem; }}
</style>
</head>
<body>
<nav>{contents}</nav>
<main>
{body}</main>
</body>
</html>
"""


def html_page(text: str, *, title: str) -> str:
    """The text as a page with a table of contents; every heading is a link target."""
    markdown = parser()
    tokens = markdown.parse(text)
    contents = []
    for anchor, level, heading in _with_anchors(tokens):
        if level == "h2":
            contents.append(f'<a href="#{anchor}">{escape(heading)}</a><br>')
    body = markdown.renderer.render(tokens, markdown.options, {})
    return PAGE.format(title=escape(title), contents="\n".join(contents), body=body)


def _with_anchors(tokens: list[Token]) -> list[tuple[str, str, str]]:
    """Give every heading a unique id; returns (id, tag, text)."""
    found: list[tuple[str, str, str]] = []
    seen: dict[str, int] = {}
    for opening, inline in pairwise(tokens):
        if opening.type != "heading_open":
            continue
        slug = re.sub(r"[^\w-]+", "-", inline.content.lower()).strip("-") or "section"
        seen[slug] = seen.get(slug, 0) + 1
        anchor = slug if seen[slug] == 1 else f"{slug}-{seen[slug]}"
        opening.attrSet("id", anchor)
        found.append((anchor, opening.tag, inline.content))
    return found
