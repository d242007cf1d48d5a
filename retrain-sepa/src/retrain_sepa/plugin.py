"""The registrations of this distribution, by name only: a module is imported when its name is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from retrain.api import MetricSpec, PluginSpec, TableTraits, hookimpl

if TYPE_CHECKING:
    from retrain.api import Config, Diagnosis, Problem

Register = Callable[[PluginSpec], None]

TABLES = (
    ("gtpo", "Influence of uncertainty on the credit of tokens.", "tables:GtpoTable"),
    ("hicra", "Extra credit of planning tokens.", "tables:HicraTable"),
    ("sepa", "The schedule by which uncertainty is pooled over execution tokens.", "tables:SepaTable"),
    ("planning", "The detection of planning tokens.", "tables:PlanningTable"),
)
# The defaults of [algorithm]: the condition of the paper.
DEFAULTS = {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa", "uncertainty_kind": "surprisal"}
# Parts by name; each is the attribute of that name in capitals in the module of its kind.
ADVANTAGES = {
    "grpo": 'Reward minus the group\'s mean; `scale = "std"` divides by the standard deviation.',
    "maxrl": "Reward minus the group's mean, over that mean: hard prompts weigh more.",
    "rloo": "Reward minus the mean of the group's other completions.",
    "dr_grpo": 'Reward minus the group\'s mean; Dr. GRPO with aggregation = "constant".',
    "reinforce_pp": "Reward normalised over the step, without a group baseline (REINFORCE++).",
    "reinforce_pp_baseline": "Reward minus the group's mean, normalised over the step.",
    "gdpo": "Several rewards, each normalised within its group before they are summed (GDPO).",
    "opo": "Reward minus the group's mean weighted by length (OPO).",
    "passk": "The best completion gets its lead over the second best: trains pass@k.",
    "remax": "Reward minus the reward of the prompt's greedy completion (ReMax).",
    "otb": "Reward minus the baseline of least variance at each token (optimal token baseline).",
    "distillation": "log p_teacher - log p of each token: the reverse KL to a [teacher], without a verifier.",
}
# Of the module `turns`.
TURNS = {
    "turn_return": "The discounted return of each turn minus the group's mean at that turn.",
    "gigpo": "The episode's advantage, plus each turn's return against turns from the same state (GiGPO).",
}
PARAMS = {
    "grpo": "GrpoParams",
    "maxrl": "MaxrlParams",
    "passk": "PasskParams",
    "reinforce_pp_baseline": "BaselineParams",
    "gdpo": "GdpoParams",
    "distillation": "DistillationParams",
}
TRANSFORMS = {
    "none": "Every token receives the advantage of its completion.",
    "gtpo": "Tokens are weighted by their uncertainty.",
    "gtpo_hicra": "GTPO, then more credit on planning tokens.",
    "gtpo_sepa": "GTPO on uncertainties pooled over execution tokens.",
}
UNCERTAINTIES = {
    "surprisal": "-log p of the sampled token, at most 50 nats.",
    "predictive_variance": "p (1 - p) of the sampled token.",
    "shannon_entropy": "Entropy of the sampling distribution; needs an engine that reports it.",
}
ALIASES = {
    "surprisal": ("token_surprisal", "neg_logprob", "negative_logprob", "nll"),
    "predictive_variance": ("pred_var", "bernoulli_variance"),
    "shannon_entropy": ("shannon", "entropy", "token_entropy"),
}
ALGORITHMS = ("grpo_none", "maxrl_none", "maxrl_gtpo", "maxrl_gtpo_hicra", "maxrl_gtpo_sepa")
RECIPES = {
    "grpo": "Over the group's deviation, PPO's clip, mean by sequence: arXiv:2402.03300.",
    "dr_grpo": "GRPO without division by deviation or length: arXiv:2503.20783.",
    "dapo": "GRPO by token, wider clip upwards, dynamic sampling, truncated completions masked: arXiv:2503.14476.",
    "gspo": "GRPO's advantage, ratio and clip by sequence: arXiv:2507.18071.",
    "cispo": "GRPO's advantage, a cap on each token's weight instead of a clip: arXiv:2506.13585.",
    "rloo": "REINFORCE, the baseline the mean of the other completions: arXiv:2402.14740.",
    "reinforce_pp": "PPO's clip, rewards normalised over the step: arXiv:2501.03262.",
    "reinforce_pp_baseline": "The same, the group's mean taken off first.",
    "sapo": "GRPO's advantage, a soft gate instead of a clip: arXiv:2511.20347.",
    "gmpo": "GRPO's advantage, the geometric mean of clipped ratios: arXiv:2507.20673.",
    "vespo": "GRPO's advantage, a smooth weight by the ratio of a sequence: arXiv:2602.10693.",
    "luspo": "GSPO without its division by length: arXiv:2602.05261.",
    "dppo_tv": "GRPO's advantage, a trust region by the change of probability: arXiv:2602.04879.",
    "dppo_kl": "The same by the KL divergence of a token's probability.",
    "m2po": "GRPO's advantage, tokens left out by their squared log-ratios: arXiv:2510.01161.",
    "dro": "GRPO's advantage on log p, less a squared log-ratio; no ratio.",
    "icepop": "GRPO by token, tokens masked where trainer and sampler differ: arXiv:2510.18855.",
    "sdpo": "The policy's average teaches, shown a right completion and the reward's feedback.",
    "sdft": "The model before training teaches, shown a demonstration from the data.",
}


def _specs(module: str, summaries: Mapping[str, str]) -> Iterator[PluginSpec]:
    for name, summary in summaries.items():
        yield PluginSpec(name=name, summary=summary, factory=f"retrain_sepa.{module}:{name.upper()}")


@hookimpl
def retrain_register_config_tables(register: Register) -> None:
    for name, summary, factory in TABLES:
        traits = TableTraits(flag_prefix=f"{name}_")
        register(PluginSpec(name=name, summary=summary, factory=f"retrain_sepa.{factory}", traits=traits))
    phrases, extends = "retrain_sepa.tables:PlanningPhrases", TableTraits(extends=True)
    register(PluginSpec(name="logging", summary="Planning phrases.", factory=phrases, traits=extends))
    defaults = TableTraits(extends=True, defaults=DEFAULTS)
    register(PluginSpec(name="algorithm", summary="The default condition.", factory=None, traits=defaults))


@hookimpl
def retrain_register_advantages(register: Register) -> None:
    for spec in _specs("advantages", ADVANTAGES):
        params = PARAMS.get(spec.name)
        register(replace(spec, params=f"retrain_sepa.advantages:{params}" if params else None))
    for spec in _specs("turns", TURNS):
        params = "".join(map(str.capitalize, spec.name.split("_")))
        register(replace(spec, params=f"retrain_sepa.turns:{params}Params"))


@hookimpl
def retrain_register_transforms(register: Register) -> None:
    for spec in _specs("transforms", TRANSFORMS):
        register(spec)


@hookimpl
def retrain_register_uncertainties(register: Register) -> None:
    for spec in _specs("uncertainties", UNCERTAINTIES):
        register(replace(spec, aliases=ALIASES[spec.name]))


@hookimpl
def retrain_register_algorithms(register: Register) -> None:
    for spec in _specs("transforms", {name: f"{name.replace('_', ' with ', 1)}." for name in ALGORITHMS}):
        register(spec)


@hookimpl
def retrain_register_recipes(register: Register) -> None:
    for spec in _specs("recipes", RECIPES):
        register(spec)


@hookimpl
def retrain_register_planning_detectors(register: Register) -> None:
    regex = "Marks tokens of curated planning phrases; `[logging] strategic_grams` replaces them."
    register(PluginSpec(name="regex", summary=regex, factory="retrain_sepa.planning:regex_detector"))
    semantic = "Marks windows of words that resemble planning; `[planning] model` embeds them."
    register(PluginSpec(name="semantic", summary=semantic, factory="retrain_sepa.planning:semantic_detector"))


@hookimpl
def retrain_register_controllers(register: Register) -> None:
    summary = "Pooling strength lambda per step: linear or auto, behind a correct-rate gate."
    register(PluginSpec(name="sepa", summary=summary, factory="retrain_sepa.controller:sepa_controller"))


@hookimpl
def retrain_check_config(config: Config) -> list[Problem]:
    from retrain.api import Problem

    if config.algorithm.advantage_mode != "distillation" or config.algorithm.algorithm_mode:
        return []
    if config.teacher.is_set or config.distil.teacher:
        return []
    what, why = "there is no teacher", "advantage 'distillation' takes its rewards from the model of [teacher]"
    fix, where = "set [teacher] model, adapter or engine, or [distil] teacher", config.place("algorithm.advantage_mode")
    return [Problem(code="teacher.missing", where=where, what=what, why=why, fix=fix)]


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    meaning = "1 if the correct-rate gate lets lambda through."
    return [MetricSpec(name="sepa_gate_open", meaning=meaning, unit="flag", absent="without the controller sepa")]


@hookimpl
def retrain_diagnose(config: Config | None) -> list[Diagnosis]:
    from retrain.api import diagnose_extra

    needed = config is not None and config.planning.detector == "semantic"
    return [diagnose_extra("retrain-sepa", "semantic", purpose="planning detector 'semantic'", needed=needed)]
