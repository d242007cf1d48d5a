"""The parts of pages and their text. Each part renders the macro of its name in its template.

All text is untrusted: escaped, of bounded length, with control and bidirectional characters made visible.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from retrain.kernel.contracts.report import ReportPlot
from retrain.records.reading import number

# Zero-width, but part of letters in many languages and of emoji, so they stay.
JOINERS = frozenset("\u200c\u200d")


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text, or its beginning and end and the number of characters left out between them."""

    head: str
    tail: str = ""
    left_out: int = 0


def text(value: Any, most_chars: int = 400) -> Markup:
    """Return a name or a short text as HTML, cut with an ellipsis. A part stays a part."""
    if hasattr(value, "__html__"):
        return escape(value)
    shown = str(value)
    return _marked(shown[:most_chars]) + ("…" if len(shown) > most_chars else "")


def long_text(value: Excerpt) -> Markup:
    """Return beginning and end as HTML, and the number of characters left out between them."""
    if not value.left_out:
        return _marked(value.head)
    gap = Markup('\n<span class="cut">[{:,} characters left out]</span>\n').format(value.left_out)
    return _marked(value.head) + gap + _marked(value.tail)


def plain(value: object, most_chars: int = 400, *, kept: str = "") -> str:
    """Return text without markup, for a script; control characters are made visible, except those in `kept`."""
    shown = str(value)[:most_chars]
    if shown.isprintable():
        return shown
    return "".join(c if _is_harmless(c) or c in kept else _name(c) for c in shown)


def _marked(shown: str) -> Markup:
    if shown.isprintable():
        return escape(shown)
    span = Markup('<span class="ctl">{}</span>')
    return Markup("").join(
        c if _is_harmless(c) or c in "\n\t" else span.format(_name(c)) for c in shown.replace("\r\n", "\n")
    )


def _is_harmless(char: str) -> bool:
    return char.isprintable() or char in JOINERS or unicodedata.category(char) in ("Zs", "Co", "Cn")


def _name(char: str) -> str:
    """Return the visible replacement of a character that would act instead of being shown."""
    # UTF-8 cannot encode half of a pair, and writing the page would fail.
    is_lone_surrogate = 0xD800 <= ord(char) <= 0xDFFF
    return "\N{REPLACEMENT CHARACTER}" if is_lone_surrogate else f"[U+{ord(char):04X}]"


@cache
def environment() -> Environment:
    """Return the templates of all packages. They escape everything, and show control characters in attributes too."""
    found = Environment(
        loader=PackageLoader("retrain", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: plain(value, len(value), kept="\n\t") if type(value) is str else value,
    )
    found.filters |= {"text": text, "long_text": long_text}
    return found


class Part:
    """A piece of a page; a template prints it like a text."""

    __slots__ = ()
    template: ClassVar[str] = "report/parts.html.jinja"

    def __html__(self) -> str:
        module = environment().get_template(self.template).module
        return str(getattr(module, type(self).__name__.lower())(self))


Piece = str | Part
Parts = Sequence[Part | None]


@dataclass(frozen=True, slots=True)
class Link(Part):
    label: str
    address: str


@dataclass(frozen=True, slots=True)
class Links:
    """Links to files, relative to the folder of the page so that both can be moved together."""

    folder: Path

    def to(self, target: Path, label: object) -> Link:
        """Return a link to a path, never another scheme. `os.fsencode` preserves names that are not UTF-8."""
        try:
            path = Path(os.path.relpath(target.resolve(), self.folder.resolve())).as_posix()
        except ValueError:  # on another drive
            path = target.as_posix()
        return Link(str(label), ("" if path.startswith(("../", "/")) else "./") + quote(os.fsencode(path)))


@dataclass(frozen=True, slots=True)
class Words(Part):
    pieces: Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Code(Part):
    """Short text in the typeface of code; each line is below the last."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Pill(Part):
    """A state or verdict as text and colour, with an optional symbol."""

    label: str
    kind: str
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Paragraph(Part):
    """A line of text; `kind` is a class of the style sheet."""

    pieces: Sequence[Piece]
    kind: str = ""


def note(*pieces: Piece) -> Paragraph:
    return Paragraph(pieces, "note")


def lede(*pieces: Piece) -> Paragraph:
    return Paragraph(pieces, "lede")


def and_more(count: int, most: int, where: str = "") -> Paragraph | None:
    """Return the note below a list of `count` entries of which `most` are shown."""
    return note(f"and {count - most:,} more{where}") if count > most else None


@dataclass(frozen=True, slots=True)
class Heading(Part):
    text: str
    level: int = 3
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Pre(Part):
    text: str
    most_chars: int = 20_000


@dataclass(frozen=True, slots=True)
class Items(Part):
    """A list; each item has an emphasised beginning, or an empty one, and lines."""

    items: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Facts(Part):
    """Names and values; `wide` ones have a separate line."""

    pairs: Sequence[tuple[str, str]]
    wide: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Table(Part):
    """A table whose first `num_names` columns are names, the first one the head of its row."""

    caption: str
    heads: Sequence[str]
    rows: Sequence[Sequence[Piece]]
    num_names: int = 1
    is_caption_shown: bool = True


@dataclass(frozen=True, slots=True)
class Box(Part):
    """Parts in a frame: `kind` is `alert` or `findings`."""

    kind: str
    title: str
    parts: Parts


@dataclass(frozen=True, slots=True)
class Fold(Part):
    """A foldable part; with a `level`, its title is a heading."""

    title: str
    parts: Parts
    kind: str = ""
    level: int = 0
    remark: str = ""
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Tiles(Part):
    """Parts next to each other where the window is wide enough: `kind` is `plots`, `pairs` or `cards`."""

    kind: str
    parts: Parts


@dataclass(frozen=True, slots=True)
class Plot(Part):
    """A figure that the page's script draws from the plain data in `figure`; `table` has the same numbers."""

    title: str
    note: str
    figure: Mapping[str, Any]
    table: Table | None = None
    kind: str = ""
    level: int = 3


@dataclass(frozen=True, slots=True)
class Section(Part):
    """A part of the page with its heading; `name` is its anchor."""

    name: str
    title: str
    parts: Parts


def figures_of(parts: Parts) -> Iterator[Mapping[str, Any]]:
    """Yield the figures of all plots in the order of the page, by which its script assigns them."""
    for part in parts:
        if isinstance(part, Plot):
            yield part.figure
        else:
            yield from figures_of(getattr(part, "parts", ()))


def drawn(given: ReportPlot, *, kinds: Sequence[str] = ()) -> Plot:
    """Return a plugin's plot; `kinds` names the kind of each point, and kinds differ in colour."""
    figure = {
        "kind": "plugin",
        "x": [number(x) for x in given.x],
        "lines": [{"name": plain(name, 120), "y": [number(y) for y in ys]} for name, ys in given.lines.items()],
        "thin": [[number(y) for y in ys] for ys in given.thin_lines],
        "points": [number(y) for y in given.points],
        "labels": [plain(label, 200) for label in given.labels],
        "kinds": [plain(kind, 120) for kind in kinds],
        "x_title": plain(given.x_title, 120),
        "y_title": plain(given.y_title, 120),
        "x_mark": number(given.x_mark),
        "y_mark": number(given.y_mark),
        "log": given.is_log_x,
        "share": given.is_share,
    }
    table = Table(given.title, given.heads, given.rows) if given.rows else None
    return Plot(given.title, given.note, figure, table, kind="tall")
