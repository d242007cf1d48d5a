"""Markdown as a page: macros of man(7) in plain ASCII, for groff and mandoc in any locale, or HTML.

markdown-it parses; the roff is written here because no maintained Python library does it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode
from markupsafe import Markup

from retrain.report.shell import page

TITLE = '.TH RETRAIN 1 "" "retrain" "User Commands"'
NAME = ".SH NAME\nretrain \\- train a language model with verifiable rewards"
FONTS = {"strong": "\\fB", "em": "\\fI", "code_inline": "\\fB"}


def man_page(text: str) -> str:
    """The text as man(7) source; headings of levels 1 and 2 become sections, deeper ones subsections."""
    return "\n".join([TITLE, NAME, *_blocks(SyntaxTreeNode(parser().parse(text)))]) + "\n"


def html_page(text: str, *, title: str) -> str:
    """The text as a page without a script; every heading is a link target, headings of level 2 are the contents."""
    markdown = parser()
    tokens = markdown.parse(text)
    if tokens and tokens[0].tag == "h1":  # the page has its title
        del tokens[:3]
    contents: list[tuple[str, str]] = []
    seen: Counter[str] = Counter()
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            slug = re.sub(r"[^\w-]+", "-", inline.content.lower()).strip("-") or "section"
            seen[slug] += 1
            anchor = slug if seen[slug] == 1 else f"{slug}-{seen[slug]}"
            opening.attrSet("id", anchor)
            contents += [(anchor, inline.content)] if opening.tag == "h2" else []
    body = Markup(markdown.renderer.render(tokens, markdown.options, {}))
    return page("cli/manual/manual.html.jinja", kicker="retrain man", title=title, contents=contents, body=body).html


def parser() -> MarkdownIt:
    """CommonMark with tables; HTML in the text stays text."""
    return MarkdownIt("commonmark", {"html": False}).enable("table")


def _blocks(parent: SyntaxTreeNode) -> Iterator[str]:
    for node in parent.children:
        if node.type == "heading":
            is_section = node.tag in ("h1", "h2")
            title = _inline(node, is_upper=is_section).replace('"', "\\(dq").replace("\n", " ")
            yield f'{".SH" if is_section else ".SS"} "{title}"'
        elif node.type == "paragraph":
            if parent.type != "list_item":
                yield ".PP"
            yield from map(_protected, _inline(node).split("\n"))
        elif node.type in ("fence", "code_block"):
            lines = node.content.rstrip("\n").split("\n")
            yield from [".PP", ".RS 4", ".EX", *(_protected(_escaped(line)) for line in lines), ".EE", ".RE"]
        elif node.type == "list_item":
            number = parent.children.index(node) + 1
            yield ".IP \\(bu 3" if parent.type == "bullet_list" else f'.IP "{number}." 4'
            yield from _blocks(node)
        elif node.type == "table":
            yield from _table(node)
        else:
            yield from _blocks(node)


def _table(table: SyntaxTreeNode) -> Iterator[str]:
    """Each row as a tagged paragraph: the first cell is the tag, the others follow with the names of their columns."""
    header, *rows = [[_inline(cell) for cell in row.children] for section in table.children for row in section.children]
    for tag, *cells in rows:
        text = ". ".join(
            f"{name}: {cell}" if name and name != "meaning" and len(cells) > 1 else cell
            for name, cell in zip(header[1:], cells, strict=False)
            if cell
        )
        yield from (".TP", _protected(tag) or "\\&", _protected(text) or "\\&")


def _inline(node: SyntaxTreeNode, *, is_upper: bool = False) -> str:
    """The text with its fonts, in capitals on request; an external link is followed by its address."""
    if node.type in ("softbreak", "hardbreak"):
        return "\n"
    text = "".join(_inline(child, is_upper=is_upper) for child in node.children)
    if node.type in ("text", "code_inline"):
        text = _escaped(node.content.upper() if is_upper else node.content)
    if node.type in FONTS:
        return f"{FONTS[node.type]}{text}\\fR"
    address = str(node.attrs.get("href", "")) if node.type == "link" else ""
    return f"{text} <{_escaped(address)}>" if address.startswith("http") else text


def _escaped(text: str) -> str:
    """Text that roff prints verbatim: backslashes, hyphens, quotes and everything beyond ASCII."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    plain = plain.replace("^", "\\(ha").replace("~", "\\(ti")
    return "".join(c if " " <= c < "\x7f" else f"\\[u{ord(c):04X}]" for c in plain if c >= " ")


def _protected(line: str) -> str:
    """A line of text that roff does not take for a macro."""
    return f"\\&{line}" if line.startswith((".", "'")) else line
