"""Before any test, and before any library is imported: an environment that is the same for everybody."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.kit.clean_environment import cleaned

# pytest reads this file before it collects: what a library reads once (threads, colours) is clean as well.
_CLEAN = cleaned(os.environ)
_THEIR_PATH = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
for _name in set(os.environ) - set(_CLEAN):
    del os.environ[_name]
os.environ.update(_CLEAN)
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # as if activated

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell does that to what it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

MARKS = ("slow", "long", "gpu", "fake_gpu", "server", "client", "real")
_text = cache(Path.read_text)


@pytest.fixture(scope="session", autouse=True)
def _installed_plugins_are_read_once() -> Iterator[None]:
    """Reading what is installed takes half of `load_plugins`: it is done again only where something was installed."""
    from retrain.kernel.plugins import discover

    read = discover.offered_plugins
    found: dict[tuple[tuple[str, int], ...], list[Any]] = {}

    def remembered() -> Iterator[Any]:
        folders = [each for each in dict.fromkeys(sys.path) if os.path.isdir(each or ".")]
        entries = [entry for each in folders for entry in os.scandir(each or ".") if entry.name.endswith("-info")]
        # Not the folders' own times: the current one, which is often on the path, is another in each test.
        installed = tuple((entry.path, entry.stat().st_mtime_ns) for entry in entries)
        if installed not in found:
            found[installed] = list(read())
        return iter(found[installed])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(discover, "offered_plugins", remembered)
        yield


@pytest.fixture(scope="session", autouse=True)
def _tables_are_merged_once() -> Iterator[None]:
    """Pydantic takes 15 ms to make the classes of all tables, which thousands of tests ask for."""
    from retrain.run import tables

    create = tables.create_model
    made: dict[tuple[Any, str], Any] = {}

    def remembered(name: str, **parts: Any) -> Any:
        key = parts["__base__"], repr(parts)
        if key not in made:
            made[key] = create(name, **parts)
        return made[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "create_model", remembered)
        yield


@pytest.fixture(scope="module", autouse=True)
def _garbage_is_sought_in_what_is_new() -> None:
    """What was imported and collected before is left out: a collection that walks all of it takes half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def _variables_end_with_the_module() -> Iterator[None]:
    """A run in this process sets variables for libraries, and `.env` sets any: tests of other modules go without."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """pytest-xdist gives its workers the path with which pytest was started."""
    node.workerinput["their_path"] = _THEIR_PATH


def pytest_configure(config: pytest.Config) -> None:
    """What PYTHONPATH has put on the path goes as well."""
    theirs = getattr(config, "workerinput", {}).get("their_path", _THEIR_PATH)
    sys.path[:] = [folder for folder in sys.path if folder not in theirs]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests with a mark run (`-m "slow and not long"`), skip modules whose text does not name the mark.

    Importing all modules to find the tests of some takes longer than many of these tests.
    """
    expression = str(config.option.markexpr)
    if collection_path.suffix != ".py" or not re.fullmatch(r"(not )?\w+( and (not )?\w+)*", expression):
        return None
    wanted = {term for term in expression.split(" and ") if term in MARKS}
    return True if any(mark not in _text(collection_path) for mark in wanted) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A mark that a module's text does not name would never be found: see above."""
    for item in items:
        for mark in item.iter_markers():
            if mark.name in MARKS and mark.name not in _text(item.path):
                raise pytest.UsageError(f"{item.nodeid} is marked {mark.name}, but its module does not name the mark")
