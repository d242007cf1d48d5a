"""Tables that several plugins define together: keys added, defaults supplied, legacy keys refused, clashes named."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from retrain.kernel.config.keys import Table, key
from retrain.kernel.config.load import all_keys, load_config
from retrain.kernel.config.schema import AlgorithmTable, LoggingTable
from retrain.kernel.declared import PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.missing import install_line
from retrain.kernel.registry import Owner
from retrain.kernel.types import Kind
from retrain.run.check import check_names, check_options
from retrain.run.tables import registered_tables
from tests.kit.problems import codes_in


class Notebook(Table):
    """Its keys under [logging]."""

    notebook: str = key("", "Notebook; a name asks for the recorder.", selects=(Kind.RECORDER, "notebook"))
    pages: int = key(3, "Pages.", ge=1, flag="notebook_pages")


class OtherNotebook(Table):
    """A second owner of one key."""

    notebook: str = key("other", "Another notebook.")


def extended(*specs, only=""):
    """The installed plugins, each spec registered by a distribution of its own besides, and the tables they make."""
    plugins = load_plugins({"RETRAIN_PLUGINS": only} if only else {})
    plugins.left_out.clear()
    for number, spec in enumerate(specs):
        hook = hookimpl(specname="retrain_register_config_tables")(lambda register, spec=spec: register(spec))
        name = "retrain_register_config_tables"
        plugins.add(SimpleNamespace(**{name: hook}), Owner(distribution=f"dist-{number}", version="1", source="m"))
    return plugins, registered_tables(plugins)


def extension(table, model=None, **traits):
    return PluginSpec(name=table, summary="s", factory=model, traits=TableTraits(extends=True, **traits))


@pytest.fixture
def loaded(tmp_path):
    """`loaded(tables, text, *arguments)`: the configuration, and its problems as text."""

    def load(tables, text="", *arguments):
        file = tmp_path / "retrain.toml"
        file.write_text(text, encoding="utf-8")
        config, problems = load_config(file, tables=tables, arguments=arguments)
        return config, "\n".join(map(str, problems))

    return load


def test_keys_are_added_after_those_of_the_owner(loaded):
    plugins, tables = extended(extension("logging", Notebook))
    names = [each.name for each in all_keys(tables) if each.table == "logging"]
    assert names[: len(LoggingTable.model_fields)] == list(LoggingTable.model_fields)
    assert names[-2:] == ["notebook", "pages"]
    config, problems = loaded(tables, "[logging]\nnotebook = 'n'\nlog_dir = 'x'\n", "--notebook-pages", "5")
    assert problems == ""
    assert isinstance(config.logging, LoggingTable)
    values = [config.value(f"logging.{name}", "") for name in ("log_dir", "notebook", "pages")]
    assert values == ["x", "n", 5]
    assert check_names(config, plugins, tables)[0].what.startswith("no recorder named 'notebook'")
    assert len(plugins.find(Kind.CONFIG_TABLE, "logging")) == 1
    assert "greater than or equal to 1" in loaded(tables, "[logging]\npages = 0\n")[1]
    assert "JSON array" in loaded(tables, "[logging]\nstrategic_grams = '[oops'\n")[1]


def test_clashing_keys_name_both_and_a_faulty_extension_harms_nothing(loaded):
    class Mine(Table):
        log_dir: int = key(1, "Mine.")

    _, tables = extended(
        extension("logging", Notebook), extension("logging", OtherNotebook), extension("logging", Mine)
    )
    config, problems = loaded(tables)
    assert codes_in(problems) == ["plugin.clashing-keys"] * 2
    assert "[logging]: notebook is defined twice: by dist-0 1 (m) and dist-1 1 (m)" in problems
    assert "RETRAIN_BLOCK=dist-1" in problems
    assert "log_dir is defined twice: by retrain-core" in problems
    assert config.value("logging.notebook", "?") == ""
    plugins, tables = extended(extension("logging", "no_such_module:Keys"))
    assert "no_such_module" in plugins.failures[-1].error
    assert loaded(tables)[1] == ""


def test_a_default_is_supplied_with_everything_else_of_the_key_left(loaded):
    _, tables = extended(extension("algorithm", defaults={"algorithm_mode": "mine"}))
    config, problems = loaded(tables)
    assert problems == ""
    assert isinstance(config.algorithm, AlgorithmTable)
    assert config.algorithm.algorithm_mode == "mine"
    (found,) = [each for each in all_keys(tables) if each.path == "algorithm.algorithm_mode"]
    assert (found.default, found.names, found.flag) == ("mine", Kind.ALGORITHM, "algorithm-mode")


@pytest.mark.parametrize("name", ["transform_mode", "loss"])
def test_one_default_is_not_supplied_twice(name, loaded):
    _, tables = extended(extension("algorithm", defaults={name: "mine"}))
    problems = loaded(tables)[1]
    assert f"[algorithm]: {name}'s default is defined twice: by retrain-" in problems
    assert "and dist-0 1 (m)" in problems


def test_the_kernel_alone_supplies_no_default_and_names_the_distribution_that_does(loaded):
    plugins, tables = extended(only="retrain-core")
    config, problems = loaded(tables)
    assert problems == ""
    assert (config.backend.backend, config.algorithm.transform_mode, config.data.source) == ("", "", "")
    fixes = {problem.what.partition(" named ")[2]: problem.fix for problem in check_names(config, plugins, tables)}
    for name, distribution in (("local", "retrain-local"), ("match", "retrain-rewards"), ("math", "retrain-rewards")):
        assert fixes[repr(name)] == install_line(distribution)


OPTIONS = "[backend]\nbackend = 'local'\n[backend.options]\nzmq_port = "


@pytest.mark.parametrize("only", ["", "retrain-core,retrain-local,retrain-rewards,retrain-sepa"])
def test_options_of_another_backend_are_taken_at_their_defaults_alone(only, loaded):
    plugins, tables = extended(only=only)
    assert check_options(loaded(tables, OPTIONS + "5555\n")[0], plugins) == []
    (problem,) = check_options(loaded(tables, OPTIONS + "5556\n")[0], plugins)
    assert codes_in(str(problem)) == ["backend.foreign-option"]
    assert "keep the default 5555" in problem.fix
    (unknown,) = check_options(loaded(tables, OPTIONS.replace("zmq_port", "zmq_prot") + "1\n")[0], plugins)
    assert "unknown option 'zmq_prot'" in str(unknown)


def test_a_legacy_key_is_refused_with_the_lines_to_write_instead(loaded):
    _, tables = extended(extension("data", legacy_keys={"my_port": "options.port", "old_source": "source"}))
    text = "[data]\nmy_port = 1\nold_source = 'files'\noptions = {port = 2, host = 'h'}\n"
    problems = loaded(tables, text)[1]
    assert "retrain.toml:2 [data] my_port: legacy keys, removed: my_port, old_source" in problems
    assert 'source = "files"' in problems
    assert "port = 2" in problems
    assert "port = 1" not in problems
    assert loaded(tables, "[data]\nsource = 'files'\n")[1] == ""
