"""What a server is asked before a run: which model, which distribution, and whether it heeds the adapter."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from retrain.kernel.contracts.serving import Policy
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.types import Tokens
from retrain.rooms.inference.answers import Drawn
from retrain.rooms.inference.caller import Caller
from retrain.rooms.inference.client import Call, Client, RefusedError
from retrain.rooms.inference.dialect import Dialect, Served
from retrain.rooms.inference.pool import Server
from retrain.rooms.inference.settings import Settings

LOG = logging.getLogger("retrain")
PROBE_TEMPERATURE = 0.7
TOP = 5  # likeliest tokens that are compared
SAME = 2e-3  # nats: two answers of one server about one distribution
OTHER = 1e-2
BAD_REQUEST, UNPROCESSABLE = 400, 422  # of a server that does not know the fields of the question


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of all servers: `after_temperature` says which distribution their log-probabilities belong to.

    None when they showed too few of them to tell.
    """

    after_temperature: bool | None


def find_models(client: Client, dialect: Dialect, policy: Policy) -> dict[str, Served]:
    """The base model of every server, by URL; ConfigError where there is none, or several and none by its name."""
    path, body = dialect.models()
    calls = [
        Call(path=path, body=body, read=dialect.served, server=server, label="the list of models", once=True)
        for server in client.pool.servers
    ]
    found = dict(zip(client.pool.servers, client.results(calls), strict=True))
    return {server.url: _pick(server, models, policy, dialect) for server, models in found.items()}


def _pick(server: Server, models: list[Served], policy: Policy, dialect: Dialect) -> Served:
    wanted = policy.model_path
    named = [model for model in models if wanted in (model.name, model.root)]
    ends = [model for model in models if Path(model.root or model.name).name == Path(wanted).name]
    if named or len(ends) == 1 or len(models) == 1:
        return (named or ends or models)[0]
    what = f"the server has {', '.join(repr(model.name) for model in models) or 'no model'}, not {wanted!r}"
    raise ConfigError(Problem(where=server.name, what=what, fix=f"start {dialect.name} with {wanted}"))


def is_named(model: Served, policy: Policy) -> bool:
    """Whether the server's name or folder of the model is that of the policy's base."""
    return Path(policy.model_path).name in (Path(model.name).name, Path(model.root or "").name)


def question(caller: Caller, prompt_T: Tokens) -> Facts:
    """Ask every server for a few tokens at two temperatures; ConfigError when what comes back is of no use."""
    answers: list[bool | None] = []
    for server in caller.servers:
        raw, warm = _ask(caller, server, prompt_T, 1.0), _ask(caller, server, prompt_T, PROBE_TEMPERATURE)
        answers.append(_after_temperature(raw.tops, warm.tops))
    if len(set(answers)) > 1:
        what = "some servers give log-probabilities after temperature and others before it"
        fix = f"start all of them with {caller.dialect.start_hint}"
        raise ConfigError(Problem(where="[inference] url", what=what, fix=fix))
    return Facts(after_temperature=answers[0])


def _ask(caller: Caller, server: Server, prompt_T: Tokens, temperature: float, adapter: str = "") -> Drawn:
    call = caller.completion(
        prompt_T,
        seed=1,
        max_tokens=2,
        temperature=temperature,
        adapter=adapter,
        server=server,
        top=TOP,
        label="the first question",
    )
    try:
        return caller.client.results([call])[0]
    except BackendError as error:
        problem = error.problems[0]
        is_foreign = isinstance(error, RefusedError) and error.status in (BAD_REQUEST, UNPROCESSABLE)
        if "answers were unusable" not in problem.why and not is_foreign:
            raise
        why = "training needs the exact ids that were sampled, and a log-probability of each"
        fix = f"use a server that returns both; of {caller.dialect.name}, a recent version"
        raise ConfigError(Problem(where=problem.where, what=problem.what, why=why, fix=fix)) from error


def _after_temperature(raw: Mapping[str, float], warm: Mapping[str, float]) -> bool | None:
    """Compares log p at T = 1 with that at T = 0.7 of the tokens that stand in both lists.

    Before temperature both are equal. After it, differences of two tokens are 1 / 0.7 times as large.
    """
    common = sorted(raw.keys() & warm.keys())
    if len(common) < 2:
        return None
    raw_N, warm_N = np.asarray([raw[key] for key in common]), np.asarray([warm[key] for key in common])
    if not (np.isfinite(raw_N).all() and np.isfinite(warm_N).all()):
        return None
    if np.abs(raw_N - warm_N).max() < SAME:
        return None if np.ptp(raw_N) < SAME else False
    expected_N, seen_N = (raw_N - raw_N.mean()) / PROBE_TEMPERATURE, warm_N - warm_N.mean()
    return True if np.abs(expected_N - seen_N).max() < max(OTHER, 0.02 * float(np.ptp(raw_N))) else None


def refuse_deaf(caller: Caller, server: Server, prompt_T: Tokens, adapter: str) -> None:
    """ConfigError when the answer with an adapter of large random numbers is that of the base model."""
    plain, adapted = (_ask(caller, server, prompt_T, 1.0, name).tops for name in ("", adapter))
    common = sorted(plain.keys() & adapted.keys())
    if common and max(abs(plain[key] - adapted[key]) for key in common) < SAME:
        what = "the server answers with the base model although it was asked for an adapter"
        fix = f"start {caller.dialect.name} with {caller.dialect.adapter_hint}"
        raise ConfigError(Problem(where=server.name, what=what, fix=fix))


def refuse_distribution(facts: Facts, settings: Settings, dialect: Dialect, temperature: float, tis_cap: float) -> None:
    """ConfigError when what the servers report cannot be used at this temperature with these settings."""
    if temperature == 1.0 or facts.after_temperature:
        return
    if facts.after_temperature is None:
        LOG.warning("%s shows too few log-probabilities to tell whether they are after temperature.", dialect.name)
        return
    what = f"{dialect.name} reports log-probabilities before temperature, and [training] temperature = {temperature:g}"
    if settings.logprobs == "engine":
        why = "what is trained on must belong to the distribution that was sampled from"
        fix = f'start it with {dialect.start_hint}, set [inference] logprobs = "trainer", or temperature = 1.0'
        raise ConfigError(Problem(where="[inference] logprobs", what=what, why=why, fix=fix))
    if tis_cap > 0.0:
        why = "the importance weight of [algorithm] tis_cap needs the engine's own numbers after temperature"
        fix = f"start it with {dialect.start_hint}, or set tis_cap = 0"
        raise ConfigError(Problem(where="[algorithm] tis_cap", what=what, why=why, fix=fix))
