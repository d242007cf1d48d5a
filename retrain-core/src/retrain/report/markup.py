"""HTML building blocks of a report. Arguments named `..._html` are markup, all others untrusted text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote

from retrain.report.text import plain, text


@dataclass(frozen=True, slots=True)
class Links:
    """Links to files, relative to the folder of the page so that both can be moved together."""

    folder: Path

    def relative(self, target: Path) -> str:
        """The path as text."""
        try:
            return Path(os.path.relpath(target.resolve(), self.folder.resolve())).as_posix()
        except ValueError:  # on another drive
            return target.as_posix()

    def to(self, target: Path, label: object) -> str:
        """A link to a path, never another scheme. `os.fsencode` preserves names that are not UTF-8."""
        path = self.relative(target)
        address = quote(os.fsencode(path))
        prefix = "" if path.startswith(("../", "/")) else "./"
        return f'<a href="{prefix}{address}">{text(label)}</a>'


def section(name: str, title: str, *body_html: str) -> str:
    """A part of the page with its heading."""
    body = "\n".join(part for part in body_html if part)
    return f'<section id="{name}" aria-labelledby="{name}-h">\n<h2 id="{name}-h">{text(title)}</h2>\n{body}\n</section>'


def note(sentence: object) -> str:
    """A note in small print."""
    return f'<p class="note">{text(sentence, 2000)}</p>'


def table(
    caption: str,
    heads: Sequence[str],
    rows_html: Iterable[Sequence[str]],
    *,
    num_names: int = 1,
    is_caption_shown: bool = True,
) -> str:
    """Rows whose cells are markup; the first `num_names` columns are names, the first one is the row header."""
    head = "".join(
        f'<th scope="col"{"" if column < num_names else " class=num"}>{text(name)}</th>'
        for column, name in enumerate(heads)
    )
    body = "\n".join(f"<tr>{_cells(cells, num_names)}</tr>" for cells in rows_html)
    hidden = "" if is_caption_shown else ' class="off"'
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{attribute(caption)}"><table>'
        f"<caption{hidden}>{text(caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def details(summary_html: str, body_html: str, *, is_open: bool = False, kind: str = "") -> str:
    """A foldable part."""
    opened, named = " open" if is_open else "", f' class="{kind}"' if kind else ""
    return f"<details{named}{opened}><summary>{summary_html}</summary>\n{body_html}\n</details>"


def facts(pairs_html: Iterable[tuple[str, str]], *, wide: frozenset[str] = frozenset()) -> str:
    """Names and values; `wide` ones have a line of their own."""
    rows = "".join(
        f"<div{' class=wide' if name in wide else ''}><dt>{text(name)}</dt><dd>{value}</dd></div>"
        for name, value in pairs_html
    )
    return f'<dl class="facts">{rows}</dl>'


def attribute(value: object) -> str:
    """Untrusted text as the value of an attribute."""
    return escape(plain(value), quote=True)


def plot(number: int, title: str, note_text: str, numbers_html: str, *, kind: str = "", level: int = 3) -> str:
    """Container of figure `number` of the page, with its numbers below; `level` is that of its heading."""
    label = attribute(f"Chart: {title}. " + ("The table below it has the numbers." if numbers_html else ""))
    named = f"plot {kind}".strip()
    container = f'<div class="{named}" id="plot-{number}" data-figure="{number}" role="img" aria-label="{label}"></div>'
    if kind == "forest":  # one row per condition: may be tall, so it scrolls
        container = f'<div class="window" tabindex="0" role="region" aria-label="{attribute(title)}">{container}</div>'
    head = f'<figcaption><h{level}>{text(title)}</h{level}><span class="soft">{text(note_text)}</span></figcaption>'
    return (
        f"<figure>{head}{container}{details('Numbers', numbers_html, kind='numbers') if numbers_html else ''}</figure>"
    )


def _cells(cells_html: Sequence[str], num_names: int) -> str:
    first, *rest = cells_html
    others = (
        f"<td>{cell}</td>" if column < num_names else f'<td class="num">{cell}</td>'
        for column, cell in enumerate(rest, start=1)
    )
    return f'<th scope="row">{first}</th>{"".join(others)}'
