"""`[teacher]`: the model that teaches, and where it runs."""

from __future__ import annotations

from pydantic import field_validator

from retrain.kernel.config.keys import Table, key
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Kind
from retrain.text.secrets import server_urls

HERE = "pytorch"  # the engine that is no server


class TeacherTable(Table):
    """A model whose log-probabilities of the sampled tokens are their rewards; off until a key of it is set."""

    model: str = key(
        "", "Model that teaches; empty = that of [model] model, or the one model that the server has.", reads="model"
    )
    adapter: str = key(
        "", "PEFT adapter on it: its folder, or a run, whose newest checkpoint is taken.", reads="adapter"
    )
    engine: str = key(
        HERE, "pytorch = in this process, or a server: vllm, sglang; others cannot teach.", names=Kind.INFERENCE_ENGINE
    )
    url: str = key(
        "", "URL of the server, or several with commas; empty = the engine's own on this machine.", free_on_resume=True
    )
    api_key_env: str = key("", "Environment variable that holds the server's key; empty = none.", free_on_resume=True)

    _urls = field_validator("url")(server_urls)


def has_teacher(config: Config) -> bool:
    """Whether a run has one."""
    table = config.table("teacher", TeacherTable)
    return bool(table.model or table.adapter or table.engine != HERE)
