"""Names, dotted paths, search paths, and everything that the message about a missing name must contain."""

import importlib
import sys

import pytest

from retrain.kernel.errors import PluginError
from retrain.kernel.plugins import first_party
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.missing import install_line
from retrain.kernel.plugins.resolve import problem_with, resolve
from retrain.kernel.types import Kind

WHERE = "retrain.toml:7 [algorithm] transform_mode"


@pytest.fixture
def write(tmp_path, monkeypatch):
    """`write("pack/mod.py", source)` in a folder on the path; what was imported from it is forgotten afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write_module(name, source):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
        importlib.invalidate_caches()

    yield write_module
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(
            getattr(sys.modules[name], "__file__", "") or getattr(sys.modules[name], "__path__", "")
        ):
            del sys.modules[name]


def find(plugins, name, *search_paths):
    """The object that a transform name denotes."""
    return resolve(plugins, Kind.TRANSFORM, name, where=WHERE, search_paths=search_paths).target


def problem(plugins, name, *search_paths, kind=Kind.TRANSFORM):
    """The problem with a name, the same without importing where it is found that early."""
    with pytest.raises(PluginError) as caught:
        resolve(plugins, kind, name, where=WHERE, search_paths=search_paths)
    assert (caught.value.exit_code, caught.value.problems[0].where) == (2, WHERE)
    return caught.value.problems[0]


@pytest.mark.parametrize(
    ("file", "name", "search_paths"),
    [
        ("my_mod_a.py", "my_mod_a.thing", ()),
        ("my_mod_a.py", "my_mod_a:thing", ()),
        ("my_mod_b.py", "my_mod_b.thing", ("one_b", "two_b/deep")),
        ("two_b/deep/my_mod_c.py", "my_mod_c.thing", ("one_b", "./two_b/deep/")),
        ("my_pack_c/__init__.py", "my_pack_c.thing", ()),
        ("my_pack_d/inner.py", "my_pack_d.inner.thing", ()),
        ("my_pack_e/inner.py", "my_pack_e.inner:thing", ()),
        ("plugins/empty_here.py", "empty_here.thing", ("plugins",)),  # a folder without files is no candidate
    ],
)
def test_a_dotted_path_is_imported(file, name, search_paths, write, plugins, tmp_path):
    (tmp_path / "empty_here").mkdir()
    write(file, "thing = 'found'")
    assert find(plugins, name, *search_paths) == "found"


@pytest.mark.parametrize(
    ("files", "search_paths"),
    [
        (("two_t.py", "plugins/two_t.py"), ("plugins",)),
        (("two_t/__init__.py", "plugins/two_t.py"), ("plugins",)),
        (("lab/two_t.py", "plugins/two_t.py"), ("lab", "plugins")),
        (("lab/two_t.py", "lab/deep/two_t/__init__.py"), ("lab/deep", "lab")),
        (("two_t.py", "two_t/__init__.py"), ()),
        (("plugins/two_t.py", "plugins/two_t/__init__.py"), ("plugins",)),
    ],
)
def test_two_files_for_one_dotted_path_are_refused_and_both_named(files, search_paths, write, plugins, tmp_path):
    for file in files:
        write(file, f"open({str(tmp_path / 'imported')!r}, 'w')\nthing = 1")
    found = problem(plugins, "two_t.thing", *search_paths)
    assert found.code == "plugin.two-files"
    assert all(str(tmp_path / file) in found.what for file in files)
    assert problem_with(plugins, Kind.TRANSFORM, "two_t.thing", where=WHERE, search_paths=search_paths) == found
    assert not (tmp_path / "imported").exists()


def test_modules_that_hide_others_are_refused_and_registered_names_come_first(write, plugins, tmp_path):
    write("colorsys.py", "thing = 1")
    assert problem(plugins, "colorsys.thing").what.count("colorsys.py") == 2
    write("one_f/my_mod_f.py", "thing = 'same'")
    (tmp_path / "linked").symlink_to("one_f")
    (tmp_path / "my_mod_f.py").symlink_to("one_f/my_mod_f.py")
    assert find(plugins, "my_mod_f.thing", "one_f", "./one_f/", "linked") == "same"
    write("none.py", "x = 1")
    assert find(plugins, "none") is not None
    assert problem(plugins, "nonexistent_mod.none").code == "plugin.missing"


def test_copies_behind_the_installed_packages_hide_nothing(write, plugins, tmp_path, monkeypatch):
    write("copies/my_mod_l.py", "thing = 'copy'")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "copies")])  # as a resumed run has its own
    assert find(plugins, "my_mod_l.thing") == "copy"
    write("my_mod_l.py", "thing = 'here'")
    del sys.modules["my_mod_l"]
    assert find(plugins, "my_mod_l.thing") == "here"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import a_library_that_is_missing", "ModuleNotFoundError: No module named 'a_library_that_is_missing'"),
        ("import my_mod_e_of_somebody_else", "No module named 'my_mod_e_of_somebody_else'"),
        ("from json import no_such_name", "ImportError: cannot import name 'no_such_name'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def broken(:", "SyntaxError"),
        ("raise RuntimeError('on import')", "RuntimeError: on import"),
    ],
)
@pytest.mark.parametrize("folder", ["", "pack_f"])
def test_a_module_that_fails_to_import_is_not_called_missing(folder, source, error, write, plugins):
    write(f"{folder}/my_mod_e.py".lstrip("/"), source)
    found = problem(plugins, "my_mod_e.thing", folder or "plugins")
    assert found.code == "plugin.import-failed"
    assert error in found.what
    assert f"python -c 'import {f'{folder}.' if folder else ''}my_mod_e'" in found.fix


def test_messages_about_missing_names_contain_everything_needed_and_promise_nothing(plugins, monkeypatch):
    found = problem(plugins, "gtpo_seppa")
    assert (found.code, found.fix) == ("plugin.missing", "use 'gtpo_sepa'")
    assert "did you mean 'gtpo_sepa'?" in found.why
    for name in ("gtpo", "gtpo_hicra", "gtpo_sepa", "none"):
        assert f"{name} (retrain-sepa 0.1.0)" in found.why
    looked_for = "no module found under plugins.nowhere_mod, more.nowhere_mod, nowhere_mod"
    assert looked_for in problem(plugins, "nowhere_mod.thing", "plugins", "more").why
    nowhere = problem(plugins, "zzzzzz", kind=Kind.REWARD).fix
    assert nowhere == "use a known name, or install the distribution that provides it"
    monkeypatch.setitem(first_party._names(), Kind.LAUNCHER, {first_party.CORE: ["subprocess", "later"]})
    found = problem(plugins, "later", kind=Kind.LAUNCHER)
    assert "documented but not built in this version of retrain-core" in found.fix
    assert "pip install" not in found.fix


@pytest.mark.parametrize(
    ("kind", "name", "distribution"),
    [
        (Kind.ADVANTAGE, "grpo", "retrain-sepa"),
        (Kind.TRANSFORM, "gtpo_sepa", "retrain-sepa"),
        (Kind.TRANSFORM, "gtpo_seppa", "retrain-sepa"),
        (Kind.REWARD, "match", "retrain-rewards"),
        (Kind.BACKEND, "local", "retrain-local"),
        (Kind.BACKEND, "tinker", "retrain-tinker"),
    ],
)
def test_a_name_of_an_uninstalled_distribution_of_ours_comes_with_its_install_line(kind, name, distribution):
    only_core = load_plugins({"RETRAIN_PLUGINS": "retrain-core"})
    assert "RETRAIN_BLOCK leaves it out" in problem(only_core, name, kind=kind).fix
    only_core.left_out.clear()  # as if the others were not installed at all
    found = problem(only_core, name, kind=kind)
    assert f"known {kind} names: none installed" in found.why
    assert found.fix == install_line(distribution)


@pytest.mark.parametrize("name", ["", ".", "..", "a..b", ".a", "a.", "a b.c", "1a.b", "a.b-c", "\x1b[31m", "a/b.c"])
def test_hostile_names_are_just_missing(name, plugins):
    found = problem(plugins, name, "plugins")
    assert found.code == "plugin.missing"
    assert repr(name) in found.what
    assert problem_with(plugins, Kind.TRANSFORM, name, where=WHERE, search_paths=["plugins"]) == found


def test_a_quick_look_imports_nothing(write, plugins, tmp_path):
    write("my_mod_g.py", f"open({str(tmp_path / 'imported')!r}, 'w')\nthing = 1")
    for name in ("my_mod_g.thing", "match"):
        assert problem_with(plugins, Kind.REWARD, name, where=WHERE, search_paths=["plugins"]) is None
    assert not (tmp_path / "imported").exists()
