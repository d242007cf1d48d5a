"""What this distribution registers: names only; the modules they point to are imported when a name is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from retrain.api import MetricSpec, PluginSpec, TableTraits, hookimpl

if TYPE_CHECKING:
    from retrain.api import Config, Diagnosis, Problem

Register = Callable[[PluginSpec], None]

TABLES = (
    ("gtpo", "How strongly uncertainty shapes the credit of tokens.", "tables:GtpoTable"),
    ("hicra", "How much more credit planning tokens get.", "tables:HicraTable"),
    ("sepa", "When and how far the uncertainty of execution tokens is pooled.", "tables:SepaTable"),
    ("planning", "Which tokens count as planning.", "tables:PlanningTable"),
)
# What [algorithm] says when nobody says otherwise: the condition of the paper.
DEFAULTS = {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa", "uncertainty_kind": "surprisal"}
ADVANTAGES = (
    (
        "grpo",
        'Reward minus the group\'s mean; `scale = "std"` divides by the standard deviation.',
        "advantages:GRPO",
        "advantages:GrpoParams",
    ),
    (
        "maxrl",
        "Reward minus the group's mean, over that mean: hard prompts weigh more.",
        "advantages:maxrl",
        "advantages:MaxrlParams",
    ),
    ("rloo", "Reward minus the mean of the group's other completions.", "advantages:RLOO", ""),
    ("dr_grpo", 'Reward minus the group\'s mean; Dr. GRPO with aggregation = "constant".', "advantages:DR_GRPO", ""),
    (
        "reinforce_pp",
        "Reward normalised over the step, without a group baseline (REINFORCE++).",
        "advantages:REINFORCE_PP",
        "",
    ),
    (
        "reinforce_pp_baseline",
        "Reward minus the group's mean, normalised over the step.",
        "advantages:REINFORCE_PP_BASELINE",
        "advantages:BaselineParams",
    ),
    (
        "gdpo",
        "Several rewards, each normalised within its group before they are summed (GDPO).",
        "advantages:GDPO",
        "advantages:GdpoParams",
    ),
    (
        "distillation",
        "log p_teacher - log p of each token: the reverse KL to a [teacher], without a verifier.",
        "distillation:DISTILLATION",
        "distillation:DistillationParams",
    ),
)
TRANSFORMS = (
    ("none", "Every token receives the advantage of its completion.", "NONE"),
    ("gtpo", "Tokens are weighted by their uncertainty.", "GTPO"),
    ("gtpo_hicra", "GTPO, then more credit on planning tokens.", "GTPO_HICRA"),
    ("gtpo_sepa", "GTPO on uncertainties pooled over execution tokens.", "GTPO_SEPA"),
)
UNCERTAINTIES = (
    (
        "surprisal",
        "-log p of the sampled token, at most 50 nats.",
        "SURPRISAL",
        ("token_surprisal", "neg_logprob", "negative_logprob", "nll"),
    ),
    (
        "predictive_variance",
        "p (1 - p) of the sampled token.",
        "PREDICTIVE_VARIANCE",
        ("pred_var", "bernoulli_variance"),
    ),
    (
        "shannon_entropy",
        "Entropy of the sampling distribution; needs an engine that reports it.",
        "SHANNON_ENTROPY",
        ("shannon", "entropy", "token_entropy"),
    ),
)
ALGORITHMS = (
    ("grpo_none", "grpo with none.", "GRPO_NONE"),
    ("maxrl_none", "maxrl with none.", "MAXRL_NONE"),
    ("maxrl_gtpo", "maxrl with gtpo.", "MAXRL_GTPO"),
    ("maxrl_gtpo_hicra", "maxrl with gtpo_hicra.", "MAXRL_GTPO_HICRA"),
    ("maxrl_gtpo_sepa", "maxrl with gtpo_sepa.", "MAXRL_GTPO_SEPA"),
)
RECIPES = (
    ("grpo", "Over the group's deviation, PPO's clip, mean by sequence: arXiv:2402.03300.", "GRPO"),
    ("dr_grpo", "GRPO without division by deviation or length: arXiv:2503.20783.", "DR_GRPO"),
    (
        "dapo",
        "GRPO by token, wider clip upwards, dynamic sampling, truncated completions masked: arXiv:2503.14476.",
        "DAPO",
    ),
    ("gspo", "GRPO's advantage, ratio and clip by sequence: arXiv:2507.18071.", "GSPO"),
    ("cispo", "GRPO's advantage, a cap on each token's weight instead of a clip: arXiv:2506.13585.", "CISPO"),
    ("rloo", "REINFORCE, the baseline the mean of the other completions: arXiv:2402.14740.", "RLOO"),
    ("reinforce_pp", "PPO's clip, rewards normalised over the step: arXiv:2501.03262.", "REINFORCE_PP"),
    ("reinforce_pp_baseline", "The same, the group's mean taken off first.", "REINFORCE_PP_BASELINE"),
)


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
    for name, summary, factory, params in ADVANTAGES:
        model = f"retrain_sepa.{params}" if params else None
        register(PluginSpec(name=name, summary=summary, factory=f"retrain_sepa.{factory}", params=model))


@hookimpl
def retrain_register_transforms(register: Register) -> None:
    for name, summary, attribute in TRANSFORMS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain_sepa.transforms:{attribute}"))


@hookimpl
def retrain_register_uncertainties(register: Register) -> None:
    for name, summary, attribute, aliases in UNCERTAINTIES:
        factory = f"retrain_sepa.uncertainties:{attribute}"
        register(PluginSpec(name=name, summary=summary, factory=factory, aliases=aliases))


@hookimpl
def retrain_register_algorithms(register: Register) -> None:
    for name, summary, attribute in ALGORITHMS:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain_sepa.transforms:{attribute}"))


@hookimpl
def retrain_register_recipes(register: Register) -> None:
    for name, summary, attribute in RECIPES:
        register(PluginSpec(name=name, summary=summary, factory=f"retrain_sepa.recipes:{attribute}"))


@hookimpl
def retrain_register_planning_detectors(register: Register) -> None:
    register(
        PluginSpec(
            name="regex",
            summary="Marks tokens of curated planning phrases; `[logging] strategic_grams` replaces them.",
            factory="retrain_sepa.planning.regex:regex_detector",
        )
    )
    register(
        PluginSpec(
            name="semantic",
            summary="Marks windows of words that sound like planning; `[planning] model` embeds them.",
            factory="retrain_sepa.planning.semantic:semantic_detector",
        )
    )


@hookimpl
def retrain_register_controllers(register: Register) -> None:
    register(
        PluginSpec(
            name="sepa",
            summary="Pooling strength lambda per step: linear or auto, behind a correct-rate gate.",
            factory="retrain_sepa.controller:sepa_controller",
        )
    )


@hookimpl
def retrain_check_config(config: Config) -> list[Problem]:
    """What does not go with `distillation`."""
    from retrain_sepa.distillation import problems_of

    return problems_of(config)


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    """Fields that the controller adds."""
    meaning = "Whether the correct-rate gate lets lambda through."
    return [MetricSpec(name="sepa_gate_open", meaning=meaning, unit="flag", absent="without the controller sepa")]


@hookimpl
def retrain_diagnose(config: Config | None) -> list[Diagnosis]:
    """Whether the extra `semantic` is installed, which `[planning] detector = "semantic"` needs."""
    from retrain.api import diagnose_extra

    needed = config is not None and config.planning.detector == "semantic"
    return [diagnose_extra("retrain-sepa", "semantic", purpose="planning detector 'semantic'", needed=needed)]
