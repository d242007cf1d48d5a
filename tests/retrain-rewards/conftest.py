"""What every test of the data sources needs: a source, made through the registry as the kernel makes it."""

import pytest

from retrain.api import Config, Kind, PluginContext, Seeds, load_plugins, resolve
from retrain.kernel.config.schema import DataTable, RewardLimits, ScoringTable
from retrain.kernel.plugins.resolve import validated_params
from retrain_rewards.tables import RewardTable
from tests.kit.judge_server import KEY, LONG_S
from tests.kit.reasoning_gym_entries import kept_alive


@pytest.fixture(scope="session")
def plugins():
    return load_plugins()


@pytest.fixture
def load(plugins):
    """`load("files", path=..., options={...})`: the data of a source, its options validated as the kernel does."""

    def load_source(source, **data):
        found = resolve(plugins, Kind.DATA_SOURCE, source, where="test")
        config = Config(tables={"data": DataTable(source=source, **data)})
        params, problems = validated_params(found.params, config.data.options, where="[data.options]")
        assert not problems, problems
        context = PluginContext(config=config, seeds=Seeds(1), plugins=plugins, params=params)
        loaded = found.target(context).load()
        return loaded

    return load_source


@pytest.fixture
def write(tmp_path):
    """Writes a text file below the test's folder and gives its path."""

    def write_text(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        return str(file)

    return write_text


@pytest.fixture
def build_judge(plugins, monkeypatch):
    """`build_judge(server, judge_retries=0)`: the reward with these keys, its key in OPENAI_API_KEY."""
    monkeypatch.setenv("OPENAI_API_KEY", KEY)

    def make(server=None, timeout_s=LONG_S, seed=0, **keys):
        table = RewardTable(
            **{"type": "judge", "judge_model": "m", "judge_base_url": server.url if server else "", **keys}
        )
        scoring = ScoringTable(limits={"judge": RewardLimits(timeout_s=timeout_s)})
        config = Config(tables={"reward": table, "scoring": scoring})
        context = PluginContext(config=config, seeds=Seeds(seed), plugins=plugins)
        made = resolve(plugins, Kind.REWARD, "judge", where="test").target(context)
        return made

    return make


@pytest.fixture(scope="module")
def one_entries_process():
    """Entries of reasoning-gym come from one process, which imports the library once."""
    with kept_alive():
        yield
