"""The page around parts: one file without external resources. Its policy admits only our own style and scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from retrain.kernel.version import __version__
from retrain.report.parts import Section, environment, figures_of

CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'"
PLOTLY_STYLE = "/* plotly writes its rules here */"
# The slowest level: plotly.js takes 2.0 MB of each page in place of 4.8.
LEVEL = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page, and its content security policy as a header: only a header can forbid frames."""

    html: str
    policy: str


def page(
    template: str,
    *,
    scripts: Sequence[str] = (),
    policy: str = CLOSED,
    styles: str = "",
    libraries: str = "",
    **values: Any,
) -> Page:
    """Render a template that extends `report/base.html.jinja`, with scripts from files of this package.

    On top of `policy` it may use the style sheet (or `styles`), the scripts, and `libraries`, in a policy's notation.
    """
    style, script = own("style.css"), "".join(map(own, scripts))
    policy += f"; style-src {styles or source_hash(style)}"
    policy += f"; script-src {source_hash(script)} {libraries}".rstrip() if script else ""
    values |= {"style": Markup(style), "script": Markup(script), "policy": Markup(policy), "version": __version__}
    return Page(html=environment().get_template(template).render(values), policy=f"{policy}; frame-ancestors 'none'")


def sections_page(kicker: str, title: str, sections: Sequence[Section], **data: Any) -> str:
    """Return a page of sections under a table of contents. A script draws their plots, if any, and gets `data` too."""
    values: dict[str, Any] = {"kicker": kicker, "title": title, "sections": sections, "bundle": None}
    if figures := list(figures_of(sections)):
        bundle = plotly_bundle()
        values |= {
            "data": inert({"conditions": [], "shown": [], "baseline": -1, **data, "figures": figures}),
            "bundle": bundle,
            "plotly_style": Markup(PLOTLY_STYLE),
            "scripts": ("theme.js", "page.js"),
            "styles": f"{source_hash(own('style.css'))} {source_hash(PLOTLY_STYLE)}",
            "libraries": bundle.hash,
        }
    return page("report/sections.html.jinja", **values).html


@cache
def own(name: str) -> str:
    return files("retrain.report").joinpath(name).read_text(encoding="utf-8")


def inert(data: Mapping[str, Any]) -> Markup:
    """Return JSON that cannot close its script element."""
    written = json.dumps(data, allow_nan=False, separators=(",", ":"))
    # A `</script>` or `<!--` in the data would end or change the element, whatever its type.
    return Markup(written.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def source_hash(source: str) -> str:
    """Return the hash of a script or style sheet in the notation of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode('utf-8')).digest()).decode()}'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """plotly.js as base64 of zlib: the page unpacks it and runs it only if `hash` matches.

    `style_ids` are style elements that it creates on loading unless the page has them already.
    """

    packed: Markup
    hash: str
    version: str
    style_ids: tuple[str, ...]


@cache
def plotly_bundle() -> Bundle:
    """Return the library of the installed package, read and compressed once per process."""
    script = files("plotly").joinpath("package_data/plotly.min.js").read_text(encoding="utf-8")
    version = re.search(r"plotly\.js v(\S+)", script[:300])
    return Bundle(
        packed=Markup(base64.b64encode(zlib.compress(script.encode("utf-8"), LEVEL)).decode()),
        hash=source_hash(script),
        version=version[1] if version else "",
        style_ids=tuple(dict.fromkeys(re.findall(r'getElementById\("([0-9a-f]{40,64})"\)', script))),
    )
