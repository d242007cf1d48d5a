"""Configurations of `[distil]` that are refused before anything loads."""

from __future__ import annotations

from typing import Any

from retrain.credit.flow import CreditFlow
from retrain.credit.self_teacher import fields_of
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import AlgorithmTable
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.tasks.scoring.build import has_verifier

OTHER_TERMS = ("kl.coef", "entropy.coef", "entropy.kl_cov", "entropy.clip_cov")
BY_ADVANTAGE: dict[str, Any] = {"teacher": "base", "mode": "sampled_token", "weight": 1.0, "skip_tokens": 0}


def distil_problems(config: Config, plugins: Plugins, flow: CreditFlow) -> list[Problem]:
    """Every problem with a backend that has the loss, or with one that is only given advantages."""
    table, backend, found = config.distil, config.backend.backend, list[Problem]()
    shows, adv = fields_of(table.template) - {"prompt"}, repr(flow.advantage.name)

    def refuse(when: object, path: str, what: str, fix: str) -> None:
        if when:
            code = f"distil.{path.rpartition('.')[2].replace('_', '-')}"
            found.append(Problem(code=code, where=config.place(path), what=what, fix=fix))

    refuse(config.teacher.is_set, "distil.teacher", "[teacher] names another teacher", "remove one of the two tables")
    what, fix = "one token only gives the gradient of alpha = 1", 'set alpha = 1.0, or mode = "topk"'
    refuse(table.mode == "sampled_token" and table.alpha != 1.0, "distil.alpha", what, fix)
    what, fix = "solutions and feedback come from a reward, and there is none", "choose a reward, or show {privileged}"
    refuse(shows <= {"solution", "feedback"} and not has_verifier(config), "distil.template", what, fix)
    what, fix = "a group of one has no other completion to show to its teacher", "set group_size to 2 or more"
    refuse(shows == {"solution"} and config.training.group_size == 1, "training.group_size", what, fix)
    what, fix = f"1 leaves no policy loss, so advantage {adv} has no effect", 'use "distillation", or a weight below 1'
    refuse(table.weight == 1.0 and flow.needs_verdict, "distil.weight", what, fix)
    what, fix = f"below 1, the policy loss needs an advantage other than {adv}", 'use one such as "grpo", or weight = 1'
    refuse(table.weight < 1.0 and not flow.needs_verdict, "distil.weight", what, fix)
    capabilities = declared_capabilities(config, plugins)
    if capabilities is None:
        return found
    if "distil" in capabilities.regularisers:
        for path in OTHER_TERMS:
            is_term = config.value(path, 0.0) and (path != "kl.coef" or config.kl.where == "loss")
            refuse(is_term, path, "no other term of the loss goes with [distil]", "set it to 0")
        what, fix = "has no effect: [distil] weight = 1 leaves no policy loss", "remove it, or set a weight below 1"
        # A run's own config.toml writes the default out.
        is_other = config.algorithm.loss != AlgorithmTable().loss
        refuse(table.weight == 1.0 and is_other, "algorithm.loss", what, fix)
        what = "without an adapter (lora_rank = 0) the weights of this teacher would be held twice"
        fix = 'set [model] lora_rank, or teacher = "live" and mode = "sampled_token"'
        is_second = table.teacher != "live" or table.mode != "sampled_token"
        refuse(not config.model.lora_rank and is_second, "distil.teacher", what, fix)
    elif "kl_reward" not in capabilities.regularisers:
        refuse(True, "distil.teacher", f"backend {backend!r} gives no log-probabilities of a teacher", 'use "local"')
    else:
        for name, value in BY_ADVANTAGE.items():
            what = f"backend {backend!r} lacks the loss of [distil]: it only has {name} = {value!r}"
            refuse(getattr(table, name) != value, f"distil.{name}", what, 'set that, or backend = "local"')
        has_cap = config.algorithm.loss == "cispo" and config.algorithm.clip_eps_high == table.ratio_cap
        what = f"backend {backend!r} caps the ratio in another way"
        fix = f'set [algorithm] loss = "cispo" and clip_eps_high = {table.ratio_cap:g}, or ratio_cap = 0'
        refuse(table.ratio_cap and not has_cap, "distil.ratio_cap", what, fix)
    return found
