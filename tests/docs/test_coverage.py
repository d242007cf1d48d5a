"""Nothing is undocumented: keys, flags, commands, options, parts, metrics, hooks, kinds, public names, recipes."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click
import pytest

from docs.contracts import MODULES
from docs.generate import OWN
from retrain.cli.manual.command import GENERATORS, generator
from retrain.cli.manual.sections import described
from retrain.kernel import hooks as hookspecs
from retrain.kernel.config.load import all_keys
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.registry import HOOK_OF_KIND, Plugins
from retrain.kernel.types import Kind
from retrain.run.tables import registered_tables
from tests.docs.reading import FENCE, PAGES, ROOT, SITE, WRITTEN, name_of, rows_of_keys, text_of

NO_PAGE = {Kind.CONFIG_TABLE, Kind.COMMAND, Kind.TEMPLATE}  # hooks.md says all there is


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return load_plugins({})


def _page(name: str) -> str:
    return text_of(SITE / name)


def test_generated_sections_are_not_committed() -> None:
    for page in WRITTEN:
        between = re.findall(
            r"^<!-- generated: [^\n]*\n(.*?)^<!-- end: ", page.read_text(encoding="utf-8"), re.M | re.S
        )
        assert not any(between), name_of(page)


def test_every_key_and_its_flag(plugins: Plugins) -> None:
    page = _page("reference/keys.md")
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
                shown = section.partition("\n### retrain ")[0]
                assert max(option.opts, key=len) in shown, (entry.spec.name, option.name)


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
def test_every_kind_has_a_page_with_its_checks_and_its_contract(kind: Kind) -> None:
    slug = kind.value.replace(" ", "-")
    page = _page(f"reference/kinds/{slug}.md")
    checks, contract = (page.partition(f"<!-- generated: {part} {slug} -->")[2] for part in ("checks", "contract"))
    assert "| `is_found_by_name` |" in checks
    assert f"`{HOOK_OF_KIND[kind]}(register)`" in contract


@pytest.mark.parametrize("what", ["api retrain.api", "api retrain.advantages", "contract backend"])
def test_a_section_is_the_same_in_every_process(what: str, plugins: Plugins) -> None:
    page = generator(plugins, GENERATORS | OWN)(what)
    assert " at 0x" not in page
    assert "PydanticUndefined" not in page
    assert page == generator(load_plugins({}), GENERATORS | OWN)(what)


@pytest.mark.parametrize("page", ["architecture.md", "where-things-are.md"])
def test_the_maps_of_the_tree_name_files_that_exist_and_every_package(page: str) -> None:
    roots = (ROOT / "retrain-core/src/retrain", *ROOT.glob("retrain-*/src"), ROOT)
    names = re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", _page(page))
    assert len(names) > 10
    for name in names:
        assert any((root / name).exists() for root in roots), name
    packages = {f"{path.parent.name}/" for path in roots[0].glob("*/__init__.py")}
    assert page != "architecture.md" or packages - {"testing/"} <= set(names)


def test_no_page_shows_a_folder_of_the_machine_it_was_written_on() -> None:
    for page in PAGES:
        assert not re.search(r"(?<![\w.])/(?:work|root|home)/", text_of(page)), name_of(page)


BOOK = SITE / "algorithms"
TITLES = dict.fromkeys(("reinforce_pp", "reinforce_pp_baseline"), "reinforce_pp, reinforce_pp_baseline")
OF_LOSSES = ("dapo", "gspo", "cispo")
OF_MORE_LOSSES = ("sapo", "gmpo", "luspo", "vespo", "dppo_tv", "dppo_kl", "m2po", "dro", "icepop")
OF_ITSELF = ("sdpo", "sdft")  # measured on a task of their own
ROW = r"^\| `{}` \| [\d.e-]+ \|.*\d"


def section(name: str) -> str:
    pages = {"losses.md": OF_LOSSES, "more-losses.md": OF_MORE_LOSSES, "self-distillation.md": OF_ITSELF}
    page = next((page for page, names in pages.items() if name in names), "group-advantages.md")
    text = text_of(BOOK / page).partition(f"\n## {TITLES.get(name, name)}\n")[2]
    return re.split(r"^## ", text, flags=re.MULTILINE)[0]


def missing(text: str) -> Iterator[str]:
    blocks = [(match["language"], match["body"]) for match in FENCE.finditer(text)]
    if not any(language == "text" and re.search(r"\bA(_i)? += ", body) for language, body in blocks):
        yield "formula"
    if "https://arxiv.org/abs/" not in text:
        yield "source"
    if "TRL" not in text or "verl" not in text:
        yield "differences"
    if not any(language == "pycon" for language, _ in blocks):
        yield "vectors"


def test_every_recipe_has_its_section_its_row_and_its_figures(plugins: Plugins) -> None:
    text, recipes = text_of(BOOK / "recipes.md"), [each.spec.name for each in plugins.registered(Kind.RECIPE)]
    for name in (*recipes, "maxrl", "gdpo", "opo", "passk", "remax", "otb"):
        assert not list(missing(section(name))), name
    measured = text + text_of(BOOK / "more-losses.md") + text_of(BOOK / "self-distillation.md")
    for name in recipes:
        assert re.search(ROW.format(name), measured, re.MULTILINE), name
        assert f"| [`{name}`](" in text


@pytest.mark.parametrize("trainer", ["TRL", "verl"])
def test_a_key_named_for_those_who_come_from_another_trainer_exists(trainer: str, plugins: Plugins) -> None:
    """Those of the other trainer are checked by tests/servers/test_coming_from.py."""
    known = {(key.table, key.name) for key in all_keys(registered_tables(plugins))}
    rows = rows_of_keys(trainer)
    assert len(rows) > 30
    for theirs, ours in rows:
        keys = re.findall(r"`\[(\w+)\] (\w+)`", ours)
        assert keys or ours == "none" or "`retrain " in ours, theirs
        assert set(keys) <= known, (theirs, set(keys) - known)
