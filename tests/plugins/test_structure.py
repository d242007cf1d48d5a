"""The shape of the source tree: no circle of imports, a kernel that knows no plugin, files of readable length."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {folder.parent.name: folder for folder in sorted(ROOT.glob("retrain-*/src"))}
FILES = {file: folder for folder in SOURCES.values() for file in sorted(folder.rglob("*.py"))}
KERNEL = ROOT / "retrain-core/src/retrain/kernel"
FILE_LINES = 500  # a bound that is not reached
PLUGIN_WORDS = re.compile(r"\b(gtpo|hicra|sepa|gtpo_sepa|prime_rl|wandb|tinker)\b", re.IGNORECASE)
HTML = re.compile(
    r"</?(a|b|br|code|dd|details|div|dl|dt|figure|h[1-6]|li|p|pre|section|span|svg|table|td|th|tr|ul)\b[^<]*>"
)
METADATA = re.compile(r"^\s*(?:from|import) (?:importlib[._]metadata|pkg_resources)", flags=re.MULTILINE)
INSTALL_LINES = KERNEL / "plugins/first_party.toml"  # the table of what our own distributions provide


def module_name(file: Path, folder: Path) -> str:
    """`retrain.kernel.step` of a file below `retrain-core/src`; a package is named as it is imported."""
    return ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__")


def imports(body: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """The import statements that run when a module or one of its functions does: all but those for type checkers."""
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from imports(statement.orelse)
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from imports(getattr(statement, name, []))
            for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
                yield from imports(part.body)


def imported_by(file: Path, modules: Mapping[str, Path]) -> set[str]:
    """The modules of ours that a file imports, the most specific ones: `from a import b` means `a.b` if that is one."""
    found = set()
    for statement in imports(ast.parse(file.read_text(encoding="utf-8")).body):
        if isinstance(statement, ast.Import):
            found |= {name.name for name in statement.names}
        else:
            parts = [f"{statement.module}.{name.name}" for name in statement.names]
            found |= {part if part in modules else str(statement.module) for part in parts}
    return found & set(modules)


def test_there_is_no_circle_of_imports_in_any_distribution() -> None:
    modules = {module_name(file, folder): file for file, folder in FILES.items()}
    assert {"retrain.kernel.step", "retrain_sepa.plugin", "retrain_prime_rl.plugin"} <= set(modules)
    graph = {name: imported_by(file, modules) for name, file in modules.items()}
    assert sum(map(len, graph.values())) > 1000
    TopologicalSorter(graph).prepare()  # CycleError names the modules of a circle


def test_the_kernel_names_no_plugin_but_in_the_table_of_install_lines() -> None:
    found = [
        f"{file.relative_to(KERNEL)}:{number}: {line.strip()}"
        for file in sorted(KERNEL.rglob("*"))
        if file.is_file() and file.suffix != ".pyc" and file != INSTALL_LINES
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if PLUGIN_WORDS.search(line)
    ]
    assert not found, "\n" + "\n".join(found)


def test_one_package_reads_metadata_and_the_module_that_imports_only_python() -> None:
    readers = {file for file in FILES if METADATA.search(file.read_text(encoding="utf-8"))}
    outside = {file for file in readers if file.parent != KERNEL / "plugins"}
    assert outside == {KERNEL.parent / "tools/installation.py"}  # may be all that is left when ours was overwritten
    assert len(readers) > 3


def test_no_formatted_string_holds_html() -> None:
    """Pages are templates, which escape; `{x}` between tags of an f-string would not."""
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "_" for part in node.values)
                assert not HTML.search(text), f"{file}:{node.lineno}"


def test_no_source_file_is_too_long_to_read_at_once() -> None:
    lines = {str(file): len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert {file: count for file, count in lines.items() if count > FILE_LINES} == {}
