"""A hub id without a connection: refused at once, or taken from the cache; a slow hub is still asked."""

import shutil
import socket
from contextlib import nullcontext

import pytest
from huggingface_hub import constants

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ModelTable
from retrain.kernel.errors import ConfigError
from retrain.text import hub
from retrain.text.tokenizer import context_length, load_tokenizer

NAME = "nobody/nothing"


@pytest.fixture(autouse=True)
def closed_hub(tmp_path, monkeypatch):
    """An empty cache, and a hub at a port where nobody listens."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "PAUSE_S", 0.0)
    for variable in hub.OTHER_CACHES:
        monkeypatch.delenv(variable, raising=False)
    hub._unreachable.cache_clear()
    yield
    hub._unreachable.cache_clear()


def config_of(name):
    return Config(tables={"model": ModelTable(model=name)})


def test_a_model_that_is_nowhere_is_refused_before_transformers_is_asked(plugins, monkeypatch, capfd):
    import transformers

    def asked(*_, **__):
        pytest.fail("transformers would retry for half a minute")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", asked)
    with pytest.raises(ConfigError) as refused:
        load_tokenizer(config_of(NAME), plugins)
    (problem,) = refused.value.problems
    assert problem.code == "model.hub-unreachable"
    assert "[model] model" in problem.where
    assert "http://127.0.0.1:9 cannot be reached" in problem.what
    assert "refused" in problem.what
    assert context_length(config_of(NAME), plugins) is None
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="unset HF_HUB_OFFLINE"):
        load_tokenizer(config_of(NAME), plugins)
    assert "Retrying" not in capfd.readouterr().err


def test_without_a_connection_the_cache_is_used(tmp_path, tokenizer_folder, plugins, monkeypatch):
    import transformers.utils.hub

    # transformers 4 reads the folder of the cache when it is imported
    monkeypatch.setattr(transformers.utils.hub, "TRANSFORMERS_CACHE", str(tmp_path / "hub"), raising=False)
    repository = tmp_path / "hub" / "models--nobody--nothing"
    shutil.copytree(tokenizer_folder, repository / "snapshots" / "abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (repository / "snapshots/abc/config.json").write_text('{"model_type": "qwen3", "max_position_embeddings": 77}')
    assert hub.hub_options(NAME, where="") == {"local_files_only": True}
    assert len(load_tokenizer(config_of(NAME), plugins)) == 20
    assert context_length(config_of(NAME), plugins) == 77


def test_a_hub_that_is_slow_or_answers_an_error_is_asked_as_ever(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:  # it accepts, and never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setattr(hub, "PROBE_TIMEOUT_S", 0.1)
        assert hub.hub_options(NAME, where="") == {}


FAULTS = [
    *((socket.gaierror(-2, "Name or service not known"), True), (OSError(101, "Network is unreachable"), True)),
    *((TimeoutError("timed out"), False), (ConnectionResetError(104, "Connection reset by peer"), False)),
    (ValueError("a proxy of a kind that is not known"), False),
]


@pytest.mark.parametrize(("error", "is_final"), FAULTS)
def test_only_a_failed_connection_is_final(monkeypatch, error, is_final):
    import huggingface_hub

    asked = []

    class Session:
        def head(self, url, timeout):
            asked.append(url)
            try:
                raise error
            except Exception as cause:
                raise RuntimeError("as the HTTP library wraps it") from cause

    monkeypatch.setattr(huggingface_hub, "get_session", Session)
    with pytest.raises(ConfigError) if is_final else nullcontext():
        assert hub.hub_options(NAME, where="") == {}
    assert len(asked) == (2 if is_final else 1)
