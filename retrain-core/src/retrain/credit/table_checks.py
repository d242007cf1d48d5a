"""Configurations of `[kl]`, `[entropy]`, `[sft]`, `[teacher]` and `[distil]` that are refused before anything loads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retrain.credit.configured_loss import applicable_losses
from retrain.credit.flow import CreditFlow
from retrain.credit.self_teacher import fields_of
from retrain.credit.warm_up import LIKELIHOOD
from retrain.kernel.config.plugin_tables import HERE, EntropyTable, KlTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import AlgorithmTable
from retrain.kernel.declared import EngineTraits, Kind
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.resolve import declared_capabilities
from retrain.kernel.registry import Plugins
from retrain.tasks.scoring.build import has_verifier

SWITCHES = {"entropy": "entropy.coef", "kl_cov": "entropy.kl_cov", "clip_cov": "entropy.clip_cov"}
# Keys that depend on verdicts and would do nothing, or the wrong thing, where credit needs none.
# The first entry is the value that is refused or, if it is 0, the only one that is not.
OF_VERDICTS: dict[str, tuple[Any, str, str]] = {
    "training.refill": (0, "every group teaches, so no further prompts are ever drawn", "set refill = 0"),
    "training.overlong": ("drop", "it takes away a verdict that credit does not need", 'use overlong = "mask"'),
    "training.soft_overlong": (0, "it lowers scores, and they are not trained on", "set soft_overlong = 0"),
}
OTHER_TERMS = ("kl.coef", "entropy.coef", "entropy.kl_cov", "entropy.clip_cov")
BY_ADVANTAGE: dict[str, Any] = {"teacher": "base", "mode": "sampled_token", "weight": 1.0, "skip_tokens": 0}


def table_problems(config: Config, plugins: Plugins, flow: CreditFlow | None) -> list[Problem]:
    """Every problem with these tables, and with a `flow` that trains without verdicts."""
    problems = [*_unsupported(config, plugins, config.kl), *_of_kl(config, config.kl)]
    problems += _of_covariances(config, config.entropy)
    problems += _of_sft(config, plugins) if config.sft.steps else ()
    if flow and config.distil.teacher:
        problems += _of_distil(config, plugins, flow)
    return [*problems, *(_of_teacher(config, plugins, flow) if flow else ())]


def _unsupported(config: Config, plugins: Plugins, kl: KlTable) -> Iterator[Problem]:
    """Terms that are switched on and missing from the backend's `Capabilities.regularisers`."""
    wanted = {f"kl_{kl.where}": "kl.coef"} if kl.coef else {}
    wanted |= {name: path for name, path in SWITCHES.items() if config.value(path, 0.0)}
    declared = declared_capabilities(config, plugins) if wanted else None
    offered = declared.regularisers if declared else frozenset()
    for name in wanted.keys() - offered:
        path, backend = wanted[name], config.backend.backend
        needed = "reference log-probabilities" if name == "kl_reward" else f"the term {name!r} of the loss"
        setting = f"{path.partition('.')[2]} = {config.value(path, 0.0)}"
        what = f"{setting} needs {needed}, and backend {backend!r} lacks that"
        fix = "set it to 0, or use a backend that has it, such as local"
        if name == "kl_loss" and "kl_reward" in offered:
            fix = 'set where = "reward", or coef = 0'
        yield Problem(code="backend.lacks-term", where=config.place(path), what=what, fix=fix)


def _of_kl(config: Config, kl: KlTable) -> Iterator[Problem]:
    if kl.where == "reward" and kl.estimator in ("k2", "k3"):
        what = f"estimator = {kl.estimator!r} is refused in the reward"
        why = "as a reward only k1 has the gradient of the KL divergence from the reference"
        fix = 'set estimator = "k1", or where = "loss"'
        yield Problem(code="kl.bad-estimator", where=config.place("kl.estimator"), what=what, why=why, fix=fix)
    if bool(kl.target) != bool(kl.horizon):
        given, missing = ("target", "horizon") if kl.target else ("horizon", "target")
        what, why = f"{given} is set and {missing} is not", "both steer the coefficient"
        fix = f"set {missing} too, or {given} = 0"
        yield Problem(code="kl.half-steered", where=config.place(f"kl.{given}"), what=what, why=why, fix=fix)
    if kl.target and not kl.coef:
        what, why = f"target = {kl.target} has no effect with coef = 0", "steering multiplies the coefficient"
        fix = "start from a coef such as 0.01"
        yield Problem(code="kl.no-coef", where=config.place("kl.target"), what=what, why=why, fix=fix)


def _of_covariances(config: Config, entropy: EntropyTable) -> Iterator[Problem]:
    where = config.place("entropy.kl_cov")
    if entropy.kl_cov and entropy.clip_cov:
        what = "kl_cov and clip_cov are both on"
        why = "both act on the same tokens, and clip_cov takes away their gradient"
        yield Problem(code="entropy.two-terms", where=where, what=what, why=why, fix="set one of them to 0")
    if entropy.clip_cov and not entropy.clip_cov_low < entropy.clip_cov_high:
        what = f"clip_cov_low = {entropy.clip_cov_low} is not below clip_cov_high = {entropy.clip_cov_high}"
        fix = "set clip_cov_low below clip_cov_high, such as 1 and 5"
        yield Problem(code="entropy.empty-range", where=config.place("entropy.clip_cov_low"), what=what, fix=fix)
    if not entropy.kl_cov:
        return
    if config.algorithm.loss != "importance_sampling":
        what = f"kl_cov is refused with loss = {config.algorithm.loss!r}"
        fix = 'set loss = "importance_sampling", or use clip_cov'
        why = "it takes the place of a clipped ratio"
        yield Problem(code="entropy.clipped-loss", where=where, what=what, why=why, fix=fix)
    updates = config.training.minibatches * config.training.epochs
    if updates == 1 and "," not in config.backend.devices:
        what, why = "kl_cov has no effect with one update per step", "the policy is then still the one that sampled"
        fix = "set [training] minibatches or epochs above 1, or kl_cov = 0"
        yield Problem(code="entropy.one-update", where=where, what=what, why=why, fix=fix)


def _of_sft(config: Config, plugins: Plugins) -> Iterator[Problem]:
    table, backend = config.sft, config.backend.backend
    if plugins.find(Kind.BACKEND, backend) and LIKELIHOOD not in applicable_losses(plugins, backend):
        what = f"backend {backend!r} cannot train on given answers"
        why = f"it does not apply the loss {LIKELIHOOD!r}"
        backends = [entry.spec.name for entry in plugins.registered(Kind.BACKEND)]
        able = [name for name in backends if LIKELIHOOD in applicable_losses(plugins, name)]
        fix = "set steps = 0, or use [backend] backend = " + " or ".join(f'"{name}"' for name in able)
        yield Problem(code="sft.not-supported", where=config.place("sft.steps"), what=what, why=why, fix=fix)
    for name in ("path", "options"):
        if getattr(table, name) and not table.source:
            what, fix = "says where another source is read, but source is empty", "set [sft] source, or remove it"
            yield Problem(code="sft.no-source", where=config.place(f"sft.{name}"), what=what, fix=fix)


def _of_teacher(config: Config, plugins: Plugins, flow: CreditFlow) -> Iterator[Problem]:
    if not flow.needs_verdict:
        yield from _of_verdicts(config, flow)
    if not has_verifier(config):
        yield from _without_verifier(config, flow)
    if config.teacher.is_set:
        yield from _unread(config, plugins, flow)
        yield from _of_engine(config, plugins)
    elif config.teacher.url or config.teacher.api_key_env:
        where = config.place("teacher.url" if config.teacher.url else "teacher.api_key_env")
        fix = 'set engine = "vllm" or "sglang", or remove it'
        yield Problem(code="teacher.no-server", where=where, what="has no effect: [teacher] names no server", fix=fix)


def _of_verdicts(config: Config, flow: CreditFlow) -> Iterator[Problem]:
    for path, (value, why, fix) in OF_VERDICTS.items():
        given: Any = config.value(path, value if value == 0 else "")
        if (given == value) is bool(value):
            what = f"{path.partition('.')[2]} = {given!r} does not go with advantage {flow.advantage.name!r}"
            fix = f"{fix}, or use another advantage"
            yield Problem(code="credit.needs-no-verdict", where=config.place(path), what=what, why=why, fix=fix)


def _without_verifier(config: Config, flow: CreditFlow) -> Iterator[Problem]:
    """A run that judges nothing: something else must teach, and nothing can be evaluated."""
    if flow.needs_verdict:
        where = config.place("reward.weights" if config.reward.weights else "reward.type")
        what, why = "no completion would be judged", f"{flow.condition} learns only from scores"
        fix = 'choose a reward, or set [algorithm] advantage_mode = "distillation" with a [teacher]'
        yield Problem(code="credit.nothing-teaches", where=where, what=what, why=why, fix=fix)
    if config.eval.examples:
        what, why = f"examples = {config.eval.examples} needs an evaluation", "with no reward nothing is judged"
        fix = "set examples = 0, or choose a reward: with a teacher its scores are recorded and not trained on"
        yield Problem(code="eval.no-reward", where=config.place("eval.examples"), what=what, why=why, fix=fix)


def _unread(config: Config, plugins: Plugins, flow: CreditFlow) -> Iterator[Problem]:
    table = config.teacher
    where = config.place(f"teacher.{'model' if table.model else 'adapter' if table.adapter else 'engine'}")
    if not flow.needs_token_rewards:
        what, why = "the teacher would have no effect", f"{flow.condition} takes no rewards of single tokens"
        fix = 'set [algorithm] advantage_mode = "distillation", or remove [teacher]'
        yield Problem(code="teacher.no-effect", where=where, what=what, why=why, fix=fix)
    capabilities = declared_capabilities(config, plugins)
    if capabilities is not None and not capabilities.preserves_token_advantages:
        what = f"backend {config.backend.backend!r} gives every token of a completion the same advantage"
        why = "a teacher gives each token a separate reward"
        fix = 'use [backend] backend = "local"'
        yield Problem(code="teacher.no-token-credit", where=where, what=what, why=why, fix=fix)


def _of_engine(config: Config, plugins: Plugins) -> Iterator[Problem]:
    table, where = config.teacher, config.place("teacher.engine")
    engines = {entry.spec.name: entry.spec.traits for entry in plugins.registered(Kind.INFERENCE_ENGINE)}
    teaching = {name: t for name, t in engines.items() if isinstance(t, EngineTraits) and t.open_teacher}
    if table.engine not in teaching:
        if plugins.find(Kind.INFERENCE_ENGINE, table.engine):  # an unknown name is reported as such
            what = f"engine {table.engine!r} does not report log-probabilities of given tokens"
            fix = f"use one of: {', '.join(sorted(teaching))}"
            yield Problem(code="teacher.bad-engine", where=where, what=what, fix=fix)
        elif table.engine == HERE:
            what, fix = "no installed distribution runs a teacher in this process", "pip install retrain-local"
            yield Problem(code="teacher.not-installed", where=where, what=what, fix=fix)
        return
    if table.engine != HERE and table.adapter:
        what, fix = "a server is given no adapter", "start it with the adapter merged, or under a name: [teacher] model"
        yield Problem(code="teacher.adapter-on-server", where=config.place("teacher.adapter"), what=what, fix=fix)
    temperature = config.training.temperature
    if temperature != 1.0 and not teaching[table.engine].teaches_at_any_temperature:
        what = f"temperature = {temperature:g} does not go with a teacher on {table.engine!r}"
        why = "servers give log-probabilities of given tokens at temperature 1, and both must be of one kind"
        fix = 'set [training] temperature = 1.0, or use [teacher] engine = "pytorch"'
        where = config.place("training.temperature")
        yield Problem(code="teacher.temperature", where=where, what=what, why=why, fix=fix)


def _of_distil(config: Config, plugins: Plugins, flow: CreditFlow) -> list[Problem]:
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
