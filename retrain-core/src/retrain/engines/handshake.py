"""Checks of a server before a run: the right model, a usable distribution, and adapters that take effect."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from retrain.engines.client import Call, Client, RefusedError
from retrain.engines.dialect import Caller, Completion, Dialect, ServedModel
from retrain.engines.policy import Policy
from retrain.engines.pool import Server
from retrain.kernel.errors import BackendError, ConfigError, Problem
from retrain.kernel.seeding import generator
from retrain.kernel.types import Tokens

LOG = logging.getLogger("retrain")
PROBE_TEMPERATURE = 0.7

SAME = 2e-3  # nats between two answers of one server about one distribution
OTHER = 1e-2
BAD_REQUEST, UNPROCESSABLE = 400, 422  # from a server that does not know the fields of the request


def find_models(client: Client, dialect: Dialect, policy: Policy) -> dict[str, ServedModel]:
    """Return the base model of every server that answers, by URL; ConfigError if it is not the policy's.

    BackendError when no server answers; a silent one is used once it does.
    """
    servers = client.pool.servers
    outcomes = client.outcomes([models_call(dialect, server) for server in servers])
    found = {server: models for server, models in zip(servers, outcomes, strict=True) if isinstance(models, list)}
    failed = {server: error for server, error in zip(servers, outcomes, strict=True) if isinstance(error, BackendError)}
    for error in failed.values():
        if isinstance(error, RefusedError) or not found:
            raise error
    for server, error in failed.items():
        LOG.warning("%s is used once it answers: %s.", server.name, error.problems[0].what)
    return {server.url: pick_model(server, models, policy, dialect) for server, models in found.items()}


def models_call(dialect: Dialect, server: Server) -> Call[list[ServedModel]]:
    """Return the call for the list of models; it also shows whether the server is there."""
    path, body = dialect.models()
    return Call(path=path, body=body, read=dialect.parse_models, server=server, label="the list of models", once=True)


def pick_model(server: Server, models: list[ServedModel], policy: Policy, dialect: Dialect) -> ServedModel:
    """Choose the policy's base model from a server's list; ConfigError if it is not in it."""
    expected = policy.model_path
    named = [model for model in models if expected in (model.name, model.root)]
    similar = [model for model in models if Path(model.root or model.name).name == Path(expected).name]
    if named or len(similar) == 1 or len(models) == 1:
        return (named or similar or models)[0]
    what = f"the server has {', '.join(repr(model.name) for model in models) or 'no model'}, not {expected!r}"
    raise ConfigError(Problem(where=server.name, what=what, fix=f"start {dialect.name} with {expected}"))


def is_named(model: ServedModel, policy: Policy) -> bool:
    """True if the server's name or folder for the model matches the policy's base model."""
    return Path(policy.model_path).name in (Path(model.name).name, Path(model.root or "").name)


def reports_after_temperature(caller: Caller, prompt_T: Tokens) -> bool | None:
    """True if the servers report log-probabilities after temperature; None when they return too few to decide.

    Samples a few tokens from each at two temperatures. ConfigError when an answer lacks data that training needs, or
    the servers disagree.
    """
    answers: list[bool | None] = []
    for server in caller.present:
        raw, warm = (_sample(caller, server, prompt_T, temperature) for temperature in (1.0, PROBE_TEMPERATURE))
        answers.append(_after_temperature(raw.tops, warm.tops))
    if len(set(answers)) > 1:
        what = "some servers report log-probabilities after temperature and others before it"
        fix = f"start all of them with {caller.dialect.start_hint}"
        raise ConfigError(Problem(where="[inference] url", what=what, fix=fix))
    return answers[0]


def _sample(caller: Caller, server: Server, prompt_T: Tokens, temperature: float, adapter: str = "") -> Completion:
    call = caller.completion(
        prompt_T,
        seed=1,
        max_tokens=2,
        temperature=temperature,
        adapter=adapter,
        server=server,
        top=TOP,
        label="the first probe",
    )
    try:
        return caller.client.results([call])[0]
    except BackendError as error:
        problem = error.problems[0]
        is_unknown_field = isinstance(error, RefusedError) and error.status in (BAD_REQUEST, UNPROCESSABLE)
        if "answers were unusable" not in problem.why and not is_unknown_field:
            raise
        why = "training needs the exact ids that were sampled, and a log-probability of each"
        fix = f"use a server that returns both; of {caller.dialect.name}, a recent version"
        raise ConfigError(Problem(where=problem.where, what=problem.what, why=why, fix=fix)) from error


def _after_temperature(raw: Mapping[str, float], warm: Mapping[str, float]) -> bool | None:
    """Compare log p at T = 1 with log p at T = 0.7 over the tokens in both lists.

    Before temperature the two are equal. After it, differences between tokens are 1 / 0.7 times as large.
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


def require_adapters(caller: Caller, server: Server, prompt_T: Tokens, adapter: str) -> None:
    """Raise ConfigError when an adapter with large random weights does not change the server's answer."""
    plain, adapted = (_sample(caller, server, prompt_T, 1.0, name).tops for name in ("", adapter))
    common = sorted(plain.keys() & adapted.keys())
    if common and max(abs(plain[key] - adapted[key]) for key in common) < SAME:
        what = "the server answers with the base model although it was asked for an adapter"
        fix = f"start {caller.dialect.name} with {caller.dialect.adapter_hint}"
        raise ConfigError(Problem(where=server.name, what=what, fix=fix))


def require_distribution(
    dialect: Dialect, after_temperature: bool | None, *, temperature: float, logprobs: str, weighed_by: str
) -> None:
    """Raise ConfigError when the reported log-probabilities cannot be used with this configuration.

    `weighed_by` is the key of `[algorithm]` that sets an importance weight, empty without one.
    """
    if temperature == 1.0 or after_temperature:
        return
    if after_temperature is None:
        LOG.warning("%s returned too few log-probabilities to tell whether they are after temperature.", dialect.name)
        return
    what = f"{dialect.name} reports log-probabilities before temperature, and [training] temperature = {temperature:g}"
    if logprobs == "engine":
        why = "behaviour log-probabilities must describe the distribution that was sampled from"
        fix = f'start it with {dialect.start_hint}, set [inference] logprobs = "trainer", or temperature = 1.0'
        raise ConfigError(Problem(where="[inference] logprobs", what=what, why=why, fix=fix))
    if weighed_by:
        why = f"the importance weight of [algorithm] {weighed_by} needs the engine's own values after temperature"
        fix = f"start it with {dialect.start_hint}, or set {weighed_by} = {'0' if weighed_by == 'tis_cap' else '[]'}"
        raise ConfigError(Problem(where=f"[algorithm] {weighed_by}", what=what, why=why, fix=fix))


PROBE_TEXT = (
    "A small town kept its records in a long, cold hall. Every spring the clerk counted 17 boxes, opened 4 of them, "
    "and wrote down what was inside: letters, maps, a broken clock, 250 coins. Then he asked himself: how many are "
    "left, and who will read them? If 3 people read 12 pages a day, the answer is 36; but nobody had ever tried. "
)
NUM_PROBES, SHORTEST, LONGEST = 8, 8, 420  # one prompt longer than the blocks in which servers cache keys and values
PROBE_TOKENS = 16
TOP = 5  # number of likeliest tokens that are compared
WEIGHTS = "adapter_model.safetensors"
PROBE_STD = 0.3  # standard deviation of the probe adapter's weights


def probe_prompts(tokenizer: Any, context_limit: int | None) -> list[Tokens]:
    """Return eight prompts of 8 to 420 tokens, shorter where the context is; each leaves room for a few tokens."""
    longest = LONGEST if context_limit is None else max(1, min(LONGEST, context_limit - PROBE_TOKENS))
    ids: list[int] = list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    ids *= 1 + longest // len(ids)
    lengths = np.geomspace(min(SHORTEST, longest), longest, NUM_PROBES).astype(int)
    texts = [tokenizer.decode(ids[start : start + length][:longest]) for start, length in enumerate(lengths)]
    # encoded again, with any token that the tokenizer prepends: some servers take text and encode it themselves
    return [np.asarray(tokenizer(text)["input_ids"], dtype=np.int64) for text in texts]


def write_probe_adapter(source: Path, folder: Path) -> bool:
    """Copy an adapter with large random weights; False when its weights have a type that numpy lacks."""
    try:
        tensors = load_file(source / WEIGHTS)
    except (OSError, TypeError, KeyError, AttributeError):  # bfloat16
        return False
    stream = generator(0)
    noise = {name: (PROBE_STD * stream.standard_normal(t.shape)).astype(t.dtype) for name, t in sorted(tensors.items())}
    folder.mkdir()
    for file in source.iterdir():
        if file.is_file() and file.name != WEIGHTS:
            shutil.copyfile(file, folder / file.name)
    save_file({name: np.ascontiguousarray(t) for name, t in noise.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    return True
