"""Markdown as a man page: the macros of man(7), ASCII throughout, so that groff and mandoc read it in any locale."""

from __future__ import annotations

from collections.abc import Sequence

from markdown_it import MarkdownIt
from markdown_it.token import Token

TITLE = '.TH RETRAIN 1 "" "retrain" "User Commands"'
NAME = ".SH NAME\nretrain \\- train a language model with verifiable rewards"
FONTS = {
    "strong_open": "\\fB",
    "strong_close": "\\fR",
    "em_open": "\\fI",
    "em_close": "\\fR",
}


def man_page(text: str) -> str:
    """The text as man(7) source; headings of the second level become sections, those below subsections."""
    return "\n".join([TITLE, NAME, *_Writer().lines(parser().parse(text))]) + "\n"


def parser() -> MarkdownIt:
    """CommonMark with tables; HTML in the text stays text."""
    return MarkdownIt("commonmark", {"html": False}).enable("table")


class _Writer:
    """Walks the tokens of a page; `out` holds finished lines."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.lists: list[int] = []  # 0 for bullets, else the number of the next item
        self.row: list[str] = []
        self.header: list[str] = []
        self.tag = ""

    def lines(self, tokens: Sequence[Token]) -> list[str]:
        """The page, line by line."""
        for index, token in enumerate(tokens):
            if token.type == "inline":
                self._inline(token, tokens[index - 1])
            elif token.type in ("fence", "code_block"):
                body = [_line(line) for line in token.content.rstrip("\n").split("\n")]
                self.out += [".PP", ".RS 4", ".EX", *body, ".EE", ".RE"]
            else:
                self._block(token)
        return self.out

    def _block(self, token: Token) -> None:
        if token.type == "paragraph_open":
            if not self.lists:
                self.out.append(".PP")
        elif token.type in ("bullet_list_open", "ordered_list_open"):
            self.lists.append(0 if token.type.startswith("bullet") else 1)
        elif token.type in ("bullet_list_close", "ordered_list_close"):
            self.lists.pop()
        elif token.type == "list_item_open":
            number = self.lists[-1]
            self.lists[-1] += bool(number)
            self.out.append(f'.IP "{number}." 4' if number else ".IP \\(bu 3")
        elif token.type == "tr_open":
            self.row = []
        elif token.type == "thead_close":
            self.header, self.row = self.row, []
        elif token.type == "tr_close" and self.row and self.header:
            self._table_row()
        elif token.type == "table_close":
            self.header = []

    def _inline(self, token: Token, before: Token) -> None:
        is_section = before.type == "heading_open" and before.tag in ("h1", "h2")
        text = _inline(token.children or [], is_upper=is_section)
        if before.type == "heading_open":
            quoted = text.replace('"', "\\(dq").replace("\n", " ")
            self.out.append(f'{".SH" if is_section else ".SS"} "{quoted}"')
        elif before.type in ("td_open", "th_open"):
            self.row.append(text)
        else:
            self.out += [_line_start(line) for line in text.split("\n")]

    def _table_row(self) -> None:
        """The first cell as a tag, the others below it, each under its column's name where that says something."""
        tag, *rest = self.row
        cells = [
            f"{header}: {cell}" if header and header != "meaning" and len(rest) > 1 else cell
            for header, cell in zip(self.header[1:], rest, strict=False)
            if cell
        ]
        self.out += [".TP", _line_start(tag) or "\\&", _line_start(". ".join(cells)) or "\\&"]


def _inline(tokens: Sequence[Token], *, is_upper: bool = False) -> str:
    """Text with fonts, in capitals if wanted; a link to elsewhere keeps its address."""
    parts, address = [], ""
    for token in tokens:
        content = token.content.upper() if is_upper else token.content
        if token.type == "text":
            parts.append(_escaped(content))
        elif token.type == "code_inline":
            parts.append(f"\\fB{_escaped(content)}\\fR")
        elif token.type in ("softbreak", "hardbreak"):
            parts.append("\n")
        elif token.type == "link_open":
            address = str(token.attrs.get("href", ""))
        elif token.type == "link_close":
            parts.append(f" <{_escaped(address)}>" if address.startswith("http") else "")
        else:
            parts.append(FONTS.get(token.type, ""))
    return "".join(parts)


def _escaped(text: str) -> str:
    """Text that roff prints as it is: backslashes, hyphens, quotes and everything beyond ASCII."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    plain = plain.replace("^", "\\(ha").replace("~", "\\(ti")
    return "".join(c if " " <= c < "\x7f" else f"\\[u{ord(c):04X}]" for c in plain if c >= " ")


def _line(text: str) -> str:
    return _line_start(_escaped(text))


def _line_start(text: str) -> str:
    """A line that begins with a dot is text, not a macro."""
    return f"\\&{text}" if text.startswith((".", "'")) else text
