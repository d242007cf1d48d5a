"""A server as a `[teacher]`: its log-probabilities of tokens that are sent to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrain.engines.client import BadAnswerError, Call, Client
from retrain.engines.dialect import Dialect, GivenToken
from retrain.engines.policy_check import PROBE_TEXT, models_call
from retrain.engines.table import Settings
from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.types import ActionRow, Floats

IMPOSSIBLE = -9999.0  # JSON has no minus infinity; vLLM writes this
ROUNDING = 1e-4  # nats by which rounding may lift a log-probability above 0
PROBE_TOKENS = 48


def open_server(dialect: Dialect, context: PluginContext) -> ServerTeacher:
    config, teacher_table = context.config, context.config.teacher
    # the limits and time-outs of [inference], with the server of [teacher]
    access = {"url": teacher_table.url, "api_key_env": teacher_table.api_key_env}
    tables = {**config.tables, "inference": config.inference.model_copy(update=access)}
    origins = {**config.origins, "inference.api_key_env": config.origin("teacher.api_key_env")}
    client = Client(Settings.of(replace(config, tables=tables, origins=origins), dialect.name))
    try:
        teacher = ServerTeacher(dialect, client, _model(dialect, client, config), context.check_stop)
        teacher.require_tokens(context)
    except BaseException:
        client.close()
        raise
    return teacher


class ServerTeacher:
    """Log-probabilities of a server's model, a `retrain.api.Teacher`. Each row is one request."""

    def __init__(
        self, dialect: Dialect, client: Client, model: str, check_stop: Callable[[], None] | None = None
    ) -> None:
        self._dialect, self._client, self._model, self._check_stop = dialect, client, model, check_stop

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        if temperature != 1.0:
            what = f"a server reports log-probabilities only at temperature 1, not {temperature:g}"
            fix = "set temperature = 1.0"
            raise BackendError(Problem(code="teacher.bad-temperature", where="[teacher] engine", what=what, fix=fix))
        calls = [self._call(row.tokens_T.tolist(), f"row {number} of the teacher") for number, row in enumerate(rows)]
        found: dict[int, list[GivenToken]] = {}
        try:
            for batch in self._client.run(calls, self._check_stop):
                found.update(batch)
        except BackendError as error:
            of_teacher = (replace(p, fix=p.fix.replace("[inference]", "[teacher]")) for p in error.problems)
            raise BackendError(*of_teacher) from error
        values = (np.array([0.0, *(min(entry.logprob, 0.0) for entry in found[n])]) for n in range(len(rows)))
        return [np.where(row.action_T, values_T, 0.0) for row, values_T in zip(rows, values, strict=True)]

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""

    def close(self) -> None:
        self._client.close()

    def require_tokens(self, context: PluginContext) -> None:
        """Raise ConfigError unless a text has the same tokens under the same ids on every server."""
        ids = list(context.tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])[:PROBE_TOKENS]
        calls = [self._call(ids, "the first probe", server) for server in self._client.pool.servers]
        pairs = [pair for given in self._client.results(calls) for pair in zip(ids[1:], given, strict=True)]
        for number, entry in pairs:
            if not _is_same(context.tokenizer, int(number), entry.text):
                own, where = context.tokenizer.decode([number]), context.config.place("teacher.engine")
                what = f"the teacher {self._model!r} has another tokenizer than {context.config.model.model!r}"
                why = f"token {number} is {entry.text!r} there and {own!r} here; it is shown token ids"
                fix = "use a teacher of the same family"
                raise ConfigError(Problem(code="teacher.other-tokenizer", where=where, what=what, why=why, fix=fix))

    def _call(self, tokens: list[int], label: str, server: Any = None) -> Call[list[GivenToken]]:
        path, body = self._dialect.given_tokens(tokens, self._model)

        def read(answer: Any) -> list[GivenToken]:
            given = self._dialect.parse_given_tokens(answer, tokens)
            for value in (entry.logprob for entry in given):
                if type(value) not in (int, float) or not math.isfinite(value) or not IMPOSSIBLE < value <= ROUNDING:
                    raise BadAnswerError(f"{value!r} is not a log-probability")
            return given

        return Call(path=path, body=body, read=read, server=server, label=label)


def _is_same(tokenizer: Any, number: int, text: str | None) -> bool:
    """True unless a server's text of a token contradicts the tokenizer; half a character proves nothing."""
    if not text or "\ufffd" in text:
        return True
    return text in (tokenizer.decode([number]), tokenizer.convert_ids_to_tokens(number))


def _model(dialect: Dialect, client: Client, config: Config) -> str:
    if wanted := config.teacher.model:
        return wanted
    calls = [models_call(dialect, server) for server in client.pool.servers]
    names = {model.name for models in client.results(calls) for model in models}
    if len(names) == 1:
        return names.pop()
    what = f"the servers have {', '.join(map(repr, sorted(names))) or 'no model'}"
    where, fix = config.place("teacher.model"), "name one of them: [teacher] model"
    raise ConfigError(Problem(code="teacher.ambiguous-model", where=where, what=what, fix=fix))
