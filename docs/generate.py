"""The generated part of the site, as a hook of MkDocs: whole reference pages, and marked sections of other pages.

Nothing of it is committed. A section is a pair of markers, `<!-- generated: WHAT -->` and `<!-- end: WHAT -->`, and
`retrain.cli.manual` and the modules beside this one fill it from the installed schemas, commands and contracts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from docs.contracts import BY_SLUG, api, checks, contract, public_names, scaffold, source
from docs.support import annotated, support
from retrain.cli.manual.command import GENERATORS, generator
from retrain.cli.manual.markdown import regenerated
from retrain.kernel.plugins.discover import load_plugins

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

OWN = {each.__name__: each for each in (annotated, support, contract, checks, api, scaffold, source, public_names)}
KINDS = tuple(BY_SLUG)
# Controllers, monitors and pacers have no scaffold of their own: a plugin brings them along.
EXAMPLES = {
    "data-source": "carrying",
    "reward": "close_number",
    "inference-engine": "in_portions",
    "environment": "guess_number",
    "sampler": "mistakes",
    "planning-detector": "questions",
    "recorder": "long_csv",
    "transform": "entropy_floor",
    "uncertainty": "missing_mass",
    "recipe": "steady",
    "backend": "bigram",
    "advantage": "leave_one_out",
    "loss": "soft_gate",
    "launcher": "polite",
    "algorithm": "dr_grpo",
}
TEST = """\
```python
import pytest
from retrain.testing import conformance


@pytest.mark.parametrize("check", conformance("{kind}", "{name}.PLUGIN"), ids=str)
def test_conforms(check):
    check()
```"""


def section(what: str) -> str:
    """Return the markers of a generated section."""
    return f"<!-- generated: {what} -->\n<!-- end: {what} -->\n"


def _kind_page(kind: str) -> str:
    """Return the page of one kind of plugin: example, conformance checks, contract."""
    name = EXAMPLES.get(kind)
    parts = [f"# The {kind.replace('-', ' ')} contract\n"]
    if name:
        parts += [
            f"```bash\nretrain init-plugin --kind {kind} --name {name}   # writes plugins/{name}.py\n```\n",
            section(f"scaffold {kind} {name}"),
            "## Check it\n",
            TEST.format(kind=kind, name=name) + "\n",
        ]
    return "\n".join([*parts, section(f"checks {kind}"), "## The contract\n", section(f"contract {kind}")])


_INDEX = {
    "commands": "every command, option and exit code",
    "keys": "every key of the configuration with type, default, flag and meaning",
    "metrics": "every field of `metrics.jsonl`",
    "plugins": "every advantage, transform, loss, reward, backend, ... with its parameters",
    "hooks": "every hook, in life-cycle order",
    "api": "the names that plugins and scripts may import",
    "problems": "every `[code]` of an error with its cause and fix",
    "support": "the features that each backend has",
    "public-retrain": "the public package's names that have changed",
    **{f"kinds/{kind}": f"how to write a {kind.replace('-', ' ')}" for kind in KINDS},
}
PAGES = {
    "reference/index.md": "# Reference\n\nGenerated from the program.\n\n"
    + "\n".join(f"- [{name.rpartition('/')[2]}]({name}.md): {text}" for name, text in _INDEX.items()),
    "reference/commands.md": "# Commands\n\n" + section("commands"),
    "reference/keys.md": "# Keys\n\n" + section("keys") + "\n## A whole file\n\n" + section("annotated"),
    "reference/metrics.md": "# Metrics\n\nThe fields of `metrics.jsonl`, one line per step.\n\n" + section("metrics"),
    "reference/plugins.md": "# Installed parts\n\n" + section("plugins"),
    "reference/hooks.md": "# Hooks\n\n" + section("hooks"),
    "reference/api.md": "# Public names\n\n"
    + "\n".join(
        f"## {module}\n\n{section(f'api {module}')}"
        for module in ("retrain.api", "retrain.advantages", "retrain.testing", "retrain")
    ),
    "reference/public-retrain.md": "# Names of the public retrain\n\n" + section("public_names"),
    "reference/problems.md": "# Problems\n\nWhat a `[code]` behind an error means; `retrain help CODE` prints it.\n\n"
    + section("problems"),
    "reference/support.md": "# What each backend supports\n\n" + section("support"),
    **{f"reference/kinds/{kind}.md": _kind_page(kind) for kind in KINDS},
}


@cache
def _generate() -> Callable[[str], str]:
    return cache(generator(load_plugins({}), GENERATORS | OWN))


def filled(text: str) -> str:
    """Return a page with its generated sections filled in."""
    return regenerated(text, _generate()) if "<!-- generated: " in text else text


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages."""
    from mkdocs.structure.files import File

    for name, text in PAGES.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill the generated sections of a page."""
    return filled(markdown)
