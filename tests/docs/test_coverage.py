"""Nothing is undocumented: keys, flags, commands, options, parts, metrics, hooks, kinds and public names."""

from __future__ import annotations

import re
from functools import cache

import click
import pytest

from retrain.cli.manual.command import generator
from retrain.cli.manual.contracts import MODULES
from retrain.cli.manual.keys import described
from retrain.cli.manual.markdown import regenerated
from retrain.kernel import hooks as hookspecs
from retrain.kernel.config.load import all_keys
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.run.tables import registered_tables
from tests.docs.reading import MANUAL, ROOT, SITE, SITE_PAGES, name_of

GENERATED = [page for page in [*SITE_PAGES, MANUAL] if "<!-- generated:" in page.read_text(encoding="utf-8")]
NO_PAGE = {Kind.CONFIG_TABLE, Kind.COMMAND, Kind.TEMPLATE}  # hooks.md says all there is


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    """Everything installed."""
    return load_plugins({})


@cache
def _page(name: str) -> str:
    return (SITE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", GENERATED, ids=name_of)
def test_generated_sections_are_current(page: object, plugins: Plugins) -> None:
    text = page.read_text(encoding="utf-8")  # type: ignore[attr-defined]
    assert regenerated(text, generator(plugins)) == text, f"run `retrain man --sync {page}`, or `nox -s docs -- --sync`"


def test_every_key_and_its_flag(plugins: Plugins) -> None:
    page = _page("configuration.md")
    for key in all_keys(registered_tables(plugins)):
        section = page.partition(f"### [{key.table}]\n")[2].partition("\n### ")[0]
        assert f"| `{key.name}` |" in section, key.path
        assert f"`--{key.flag}`" in section, key.path


def test_every_command_and_option(plugins: Plugins) -> None:
    page = _page("reference/commands.md")
    for entry in plugins.registered(Kind.COMMAND):
        section = page.partition(f"### retrain {entry.spec.name}\n")[2]
        assert section, entry.spec.name
        command = entry.spec.load()
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert max(option.opts, key=len) in section.partition("\n### retrain ")[0], (
                    entry.spec.name,
                    option.name,
                )


def test_every_metric(plugins: Plugins) -> None:
    page = _page("reference/metrics.md")
    for specs in described(plugins).values():
        for spec in specs:
            assert f"| `{spec.name}` |" in page


def test_every_hook() -> None:
    page = _page("reference/hooks.md")
    names = [name for name in vars(hookspecs) if name.startswith("retrain_")]
    assert len(names) > 30
    readme = (ROOT / "retrain-core/README.md").read_text(encoding="utf-8")
    for name in names:
        assert f"def {name}(" in page
        assert name.startswith("retrain_register_") or f"| `{name}` |" in readme


def test_every_part(plugins: Plugins) -> None:
    page = _page("reference/plugins.md")
    for kind in Kind:
        section = page.partition(f"### {kind.value}\n")[2].partition("\n### ")[0]
        for entry in plugins.registered(kind):
            assert f"`{entry.spec.name}`" in section, (kind, entry.spec.name)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name(module: str) -> None:
    import importlib

    page = _page("reference/api.md")
    section = page.partition(f"<!-- generated: api {module} -->")[2].partition("<!-- end")[0]
    for name in importlib.import_module(module).__all__:
        assert f"### {name}\n" in section.replace("\\", ""), name


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in NO_PAGE], ids=str)
def test_every_kind_has_a_page_of_its_own(kind: Kind) -> None:
    slug = kind.value.replace(" ", "-")
    page = _page(f"write/{slug}.md")
    for part in (f"<!-- generated: contract {slug} -->", f"<!-- generated: checks {slug} -->", "conformance("):
        assert part in page
    assert re.search(r"^```python\n", page, re.MULTILINE)


@pytest.mark.long
def test_no_page_names_a_generator_of_its_own_making(plugins: Plugins) -> None:
    generate = generator(plugins)
    for page in GENERATED:
        for what in re.findall(r"<!-- generated: (.+?) -->", page.read_text(encoding="utf-8")):
            assert generate(what).strip(), (page, what)


@pytest.mark.parametrize("page", ["architecture.md", "where-things-are.md"])
def test_the_maps_of_the_tree_name_files_that_exist(page: str) -> None:
    roots = (ROOT / "retrain-core/src/retrain", *ROOT.glob("retrain-*/src"), ROOT)
    names = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", _page(page))
    assert len(names) > 10
    for name in names:
        assert any((root / name).exists() for root in roots), name


def test_every_package_is_on_the_architecture_page() -> None:
    roots = (ROOT / "retrain-core/src/retrain",)
    names = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", _page("architecture.md"))
    packages = {f"{path.parent.name}/" for path in roots[0].glob("*/__init__.py")}
    assert packages - {"testing/"} <= set(names)


def test_no_page_shows_a_folder_of_the_machine_it_was_written_on() -> None:
    for page in [*SITE_PAGES, MANUAL]:
        assert not re.search(r"(?<![\w.])/(?:work|root|home)/", page.read_text(encoding="utf-8")), name_of(page)
