"""The codes of all problems, with fault and fix, read from the sources of installed packages.

A code is a literal next to its sentences: `Problem(code="data.column-missing", what=f"no column {name!r}")`.
Nothing is imported and nothing is listed twice.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from retrain.cli.manual import markdown
from retrain.cli.manual.problem_texts import LITERAL, TEXTS, Texts, problems_in
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.discover import offered_plugins
from retrain.kernel.registry import Plugins

Explained = dict[str, dict[str, list[str]]]  # code -> name of a text -> the different texts, in order


def problems(plugins: Plugins) -> str:
    """Return a table of every code with its fault and fix."""
    rows = [
        (markdown.code(code), "; or ".join(texts["what"]), "; or ".join(texts["fix"]))
        for code, texts in sorted(known_problems().items())
    ]
    return markdown.table(("code", "what is wrong", "fix"), rows)


def explanation(code: str) -> str:
    """Return the text that `retrain help CODE` prints. ConfigError when no installed package has the code."""
    known = known_problems()
    if code not in known:
        areas = sorted({each.partition(".")[0] for each in known})
        near = get_close_matches(code, known, n=3, cutoff=0.5)
        fix = f"one of: {', '.join(near)}" if near else f"codes begin with one of: {', '.join(areas)}"
        raise ConfigError(Problem(code="help.unknown-code", what=f"no problem has the code {code!r}", fix=fix))
    lines = [f"{name:5}{text}" for name in TEXTS for text in known[code][name]]
    return "\n".join([f"[{code}]", *lines])


@cache
def known_problems() -> Explained:
    """Return the texts of every code in the packages of all installed distributions that offer plugins."""
    return explained(places_of_codes(_package_folders()))


def explained(places: Iterable[tuple[str, Texts]]) -> Explained:
    found: Explained = {}
    for code, texts in places:
        kept = found.setdefault(code, {name: [] for name in TEXTS})
        for name, text in texts.items():
            kept[name] += [text] if text and text not in kept[name] else []
    return found


def places_of_codes(folders: Iterable[Path]) -> list[tuple[str, Texts]]:
    """Return every place below folders that makes a problem, as its code with its texts."""
    is_collecting = gc.isenabled()
    gc.disable()  # syntax trees are large and have no cycles: collecting takes most of the time of parsing
    try:
        files = (file for folder in folders for file in sorted(folder.rglob("*.py")))
        sources = (file.read_text(encoding="utf-8") for file in files)
        # Parsing only the files that hold a code takes a third of the time.
        return [place for source in sources if LITERAL.search(source) for place in problems_in(source)]
    finally:
        if is_collecting:
            gc.enable()


def _package_folders() -> Iterator[Path]:
    packages = {"retrain"} | {offer.entry.module.partition(".")[0] for offer in offered_plugins()}
    for spec in filter(None, map(find_spec, sorted(packages))):
        yield from map(Path, spec.submodule_search_locations or ())
