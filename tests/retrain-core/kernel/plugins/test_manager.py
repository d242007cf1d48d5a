"""Discovery of real distributions through entry points: what registers, what fails alone, what settings leave out."""

import pytest

from retrain.kernel.declared import PluginSpec
from retrain.kernel.errors import HookError, PluginError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Owner, Registry
from retrain.kernel.types import Kind

HEAD = "from retrain.api import PluginSpec, hookimpl\n"
HOOK = f"{HEAD}@hookimpl\ndef "
GOOD = f"""{HEAD}
@hookimpl
def retrain_register_rewards(register):
    register(PluginSpec(name="NAME", summary="s", factory=lambda context: "NAME made", aliases=("NAME_too",)))
"""


def reward_plugin(name):
    """A module that registers one reward."""
    return GOOD.replace("NAME", name)


def test_a_distribution_registers_with_its_version_and_alias_once(distribution):
    distribution("my-rewards", {"my_rewards": reward_plugin("mine")}, version="2.3")
    plugins = load_plugins({})
    for name in ("mine", "mine_too"):
        found = resolve(plugins, Kind.REWARD, name, where="here")
        assert (found.name, str(found.owner), found.target(None)) == ("mine", "my-rewards 2.3", "mine made")
    assert [e.spec.name for e in plugins.registered(Kind.REWARD)].count("mine") == 1
    assert plugins.failures == []
    registry = Registry(Kind.REWARD)
    registry.add(PluginSpec(name="x", summary="", factory=1, aliases=("x", "y", "y")), Owner(distribution="d"))
    assert {name: len(entries) for name, entries in registry.entries.items()} == {"x": 1, "y": 1}


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import there_is_no_such_module", "ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def x(:", "SyntaxError"),
        ("VALUE = 3", "bad_one has no hook of retrain"),
        (f"{HOOK}retrain_register_reward(register): pass", "did you mean retrain_register_rewards?"),
        (f"{HEAD}def retrain_register_rewards(register): pass", "lacks the @hookimpl decorator of retrain.api"),
        (f"{HOOK}retrain_register_rewards(register): register('x')", "takes a PluginSpec, not str"),
        (f"{HOOK}retrain_register_rewards(wrong): pass", "PluginValidationError"),
        (f"{HOOK}retrain_step_end(run, metrik): pass", "PluginValidationError"),
        (f"{HOOK}retrain_register_rewards(register): raise KeyError('inside')", "KeyError: 'inside'"),
        (reward_plugin("half") + "    register(None)\n", "takes a PluginSpec, not NoneType"),
    ],
)
def test_a_faulty_plugin_fails_alone_and_its_own_error_is_kept(source, error, distribution):
    distribution("bad-one", {"bad_one": source})
    distribution("good-one", {"good_one": reward_plugin("good")})
    plugins = load_plugins({})
    assert [(f.owner.distribution, f.owner.source) for f in plugins.failures] == [("bad-one", "bad_one")]
    assert error in plugins.failures[0].error
    assert plugins.find(Kind.REWARD, "half") == []
    assert resolve(plugins, Kind.REWARD, "good", where="here").target(None) == "good made"
    assert resolve(plugins, Kind.ADVANTAGE, "grpo", where="here").target
    with pytest.raises(PluginError) as caught:
        resolve(plugins, Kind.REWARD, "goood", where="retrain.toml:3 [reward] type")
    assert "failed to load: bad-one 1.0 (bad_one): " in str(caught.value)
    assert "did you mean 'good'?" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "kept", "gone"),
    [
        ({}, {"retrain-sepa", "my-rewards"}, set()),
        ({"RETRAIN_BLOCK": "my-rewards"}, {"retrain-sepa"}, {"my-rewards"}),
        ({"RETRAIN_BLOCK": " my_rewards , retrain-sepa,"}, set(), {"my-rewards", "retrain-sepa"}),
        ({"RETRAIN_PLUGINS": "my-rewards"}, {"my-rewards", "retrain-core"}, {"retrain-sepa"}),
        ({"RETRAIN_PLUGINS": "My.Rewards"}, {"my-rewards", "retrain-core"}, {"retrain-sepa"}),
        ({"RETRAIN_PLUGINS": "nobody"}, {"retrain-core"}, {"my-rewards", "retrain-sepa"}),
        ({"RETRAIN_PLUGINS": ""}, {"retrain-sepa", "my-rewards"}, set()),
        ({"RETRAIN_BLOCK": "retrain-core"}, {"retrain-core"}, set()),
    ],
)
def test_settings_choose_distributions(settings, kept, gone, distribution):
    distribution("my-rewards", {"my_rewards": reward_plugin("mine")})
    plugins = load_plugins(settings)
    present = {entry.owner.distribution for kind in Kind for entry in plugins.registered(kind)}
    assert kept <= present
    assert not gone & present


def test_a_blocked_plugin_and_a_factory_as_text_are_imported_only_when_used(distribution, tmp_path):
    mark = tmp_path / "imported"
    distribution("bad-one", {"bad_one": f"open({str(mark)!r}, 'w')\n1 / 0"})
    assert load_plugins({"RETRAIN_BLOCK": "bad-one"}).failures == []
    assert not mark.exists()
    heavy = f"open({str(mark)!r}, 'w')\ndef make(context): return 'made'\n"
    light = reward_plugin("lazy").replace('factory=lambda context: "lazy made"', 'factory="lazy_heavy:make"')
    distribution("lazy-one", {"lazy_light": light, "lazy_heavy": heavy})
    plugins = load_plugins({"RETRAIN_BLOCK": "bad-one"})
    assert plugins.find(Kind.REWARD, "lazy")
    assert not mark.exists()
    assert resolve(plugins, Kind.REWARD, "lazy", where="here").target(None) == "made"
    assert mark.exists()


@pytest.mark.parametrize("factory", ["no_such_module_at_all:make", "json:no_such_attribute"])
def test_a_factory_that_cannot_be_imported_is_reported_with_its_owner(factory):
    plugins = load_plugins({})
    plugins.registries[Kind.REWARD].add(
        PluginSpec(name="x", summary="", factory=factory), Owner(distribution="its-owner", version="9")
    )
    with pytest.raises(PluginError) as caught:
        resolve(plugins, Kind.REWARD, "x", where="retrain.toml:3 [reward] type")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("plugin.load-failed", "retrain.toml:3 [reward] type")
    assert "its-owner 9" in problem.what
    assert factory in problem.why


def test_a_function_of_a_backend_is_found_by_its_name_and_reported_when_it_raises(distribution):
    source = f"{HEAD}from retrain.api import BackendFunctions, PluginSpec\ndef fails(path, config): return 1 / 0\n"
    source += "FUNCTIONS = BackendFunctions(find_devices=lambda config: (config, ''), fetch_adapter='one:fails')\n"
    source += "@hookimpl\ndef retrain_register_backends(register):\n"
    source += "    register(PluginSpec(name='one', summary='', factory=None, functions=FUNCTIONS))\n"
    distribution("the-one", {"one": source})
    plugins = load_plugins({})
    assert plugins.call_backend("find_devices", "cpu", backend="one") == ("cpu", "")
    assert plugins.call_backend("evaluate_loss", backend="one") is None
    assert plugins.call_backend("find_devices", "cpu", backend="unknown") is None
    with pytest.raises(HookError, match="one:fails raised ZeroDivisionError"):
        plugins.call_backend("fetch_adapter", "tinker://x", None)
