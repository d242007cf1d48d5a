"""Configurations of `[distil]` that are refused before anything loads."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.credit.flow import CreditFlow
from retrain.credit.self_teacher import fields_of
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.tasks.scoring.build import has_verifier

LOSS = "algorithm.loss"
OTHER_TERMS = ("kl.coef", "entropy.coef", "entropy.kl_cov", "entropy.clip_cov")


def distil_problems(config: Config, plugins: Plugins, flow: CreditFlow) -> Iterator[Problem]:
    table = config.distil
    if config.teacher.is_set:
        what, fix = "the policy is its own teacher, and [teacher] names another", "remove one of the two tables"
        yield _problem(config, "teacher", "two-teachers", what, fix=fix)
    if table.mode == "sampled_token" and table.alpha != 1.0:
        what, why = f"alpha = {table.alpha:g} needs a mode with more than the sampled token", "one token gives alpha 1"
        yield _problem(config, "alpha", "alpha", what, why=why, fix='set alpha = 1.0, or mode = "topk"')
    shows = fields_of(table.template) - {"prompt"}
    if shows <= {"solution", "feedback"} and not has_verifier(config):
        what, why = "solutions and feedback come from a reward, and there is none", "no completion would have a teacher"
        yield _problem(config, "template", "no-reward", what, why=why, fix="choose a reward, or show {privileged}")
    if shows == {"solution"} and config.training.group_size == 1:
        what, fix = "a group of one has no other completion to show", "raise [training] group_size"
        yield _problem(config, "template", "group-of-one", what, fix=fix)
    if table.weight == 1.0 and flow.needs_verdict:
        what = f"weight = 1 leaves no policy loss, so advantage {flow.advantage.name!r} would have no effect"
        fix = 'set [algorithm] advantage_mode = "distillation", or a weight below 1'
        yield _problem(config, "weight", "no-policy-loss", what, fix=fix)
    if table.weight < 1.0 and not flow.needs_verdict:
        what = f"weight = {table.weight:g} needs an advantage for the policy loss, and {flow.advantage.name!r} is none"
        yield _problem(config, "weight", "no-advantage", what, fix='set advantage_mode = "grpo", or weight = 1.0')
    capabilities = declared_capabilities(config, plugins)
    if capabilities is None:
        return
    if "distil" in capabilities.regularisers:
        yield from _of_trainer(config)
    else:
        yield from _by_advantage(config, "kl_reward" in capabilities.regularisers)


def _of_trainer(config: Config) -> Iterator[Problem]:
    """Problems of a backend that has the loss itself."""
    table = config.distil
    for path in OTHER_TERMS:
        is_in_loss = path != "kl.coef" or config.kl.where == "loss"
        if config.value(path, 0.0) and is_in_loss:
            what, fix = "is refused with [distil]: the distillation is a term of its own", "set it to 0"
            yield Problem(code="distil.other-term", where=config.place(path), what=what, fix=fix)
    if table.weight == 1.0 and config.origin(LOSS) != DEFAULT_ORIGIN:
        what, fix = "has no effect: [distil] weight = 1 leaves no policy loss", "remove it, or set a weight below 1"
        yield Problem(code="distil.no-policy-loss", where=config.place(LOSS), what=what, fix=fix)
    if not config.model.lora_rank and (table.teacher != "live" or table.mode != "sampled_token"):
        what = (
            f"teacher = {table.teacher!r} in mode {table.mode!r} needs an adapter, and lora_rank = 0 trains all weights"
        )
        why = "the weights of the teacher would be held twice"
        fix = 'set [model] lora_rank, or teacher = "live" and mode = "sampled_token"'
        yield _problem(config, "teacher", "no-adapter", what, why=why, fix=fix)


def _by_advantage(config: Config, has_reference: bool) -> Iterator[Problem]:
    """Problems of a backend that is only given advantages: log p_teacher - log p of the base model's."""
    table, backend = config.distil, config.backend.backend
    wanted = {"teacher": "base", "mode": "sampled_token", "weight": 1.0, "skip_tokens": 0}
    if not has_reference:
        what = f"backend {backend!r} gives no log-probabilities of the base model"
        fix = 'use [backend] backend = "local" or "tinker", or a [teacher] on a server without [distil]'
        yield _problem(config, "teacher", "lacks-teacher", what, fix=fix)
        return
    for name, value in wanted.items():
        if (given := getattr(table, name)) != value:
            what = f"{name} = {given!r} needs the loss of [distil], and backend {backend!r} lacks it"
            yield _problem(config, name, "lacks-loss", what, fix=f'set {name} = {value!r}, or backend = "local"')
    has_cap = config.algorithm.loss == "cispo" and config.algorithm.clip_eps_high == table.ratio_cap
    if table.ratio_cap and not has_cap:
        what = f"ratio_cap = {table.ratio_cap:g} is the cap of a loss that backend {backend!r} has under another name"
        fix = f'set [algorithm] loss = "cispo" and clip_eps_high = {table.ratio_cap:g}, or ratio_cap = 0'
        yield _problem(config, "ratio_cap", "lacks-cap", what, fix=fix)


def _problem(config: Config, name: str, code: str, what: str, *, fix: str, why: str = "") -> Problem:
    return Problem(code=f"distil.{code}", where=config.place(f"distil.{name}"), what=what, why=why, fix=fix)
