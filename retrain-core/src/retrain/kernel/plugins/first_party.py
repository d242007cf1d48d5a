"""Which of our own distributions provides a name, so that the message about a missing one can give its install line.

It lists every name that the documentation mentions, and the defaults that those distributions supply.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from retrain.kernel.declared import Kind
from retrain.kernel.plugins.installed import installed_version, source_folder

SEPA, REWARDS, LOCAL = "retrain-sepa", "retrain-rewards", "retrain-local"
TINKER, PRIME_RL = "retrain-tinker", "retrain-prime-rl"
CORE = "retrain-core"

_NAMES: dict[Kind, dict[str, tuple[str, ...]]] = {
    Kind.ADVANTAGE: {SEPA: ("grpo", "maxrl")},
    Kind.TRANSFORM: {SEPA: ("none", "gtpo", "gtpo_hicra", "gtpo_sepa")},
    Kind.UNCERTAINTY: {SEPA: ("surprisal", "predictive_variance", "shannon_entropy")},
    Kind.ALGORITHM: {SEPA: ("grpo_none", "maxrl_none", "maxrl_gtpo", "maxrl_gtpo_hicra", "maxrl_gtpo_sepa")},
    Kind.PLANNING_DETECTOR: {SEPA: ("regex", "semantic")},
    Kind.CONTROLLER: {SEPA: ("sepa",)},
    Kind.REWARD: {REWARDS: ("match", "math", "judge", "custom")},
    Kind.DATA_SOURCE: {REWARDS: ("math", "files", "reasoning_gym", "arithmetic")},
    Kind.ENVIRONMENT: {REWARDS: ("verifiers",)},
    Kind.BACKEND: {LOCAL: ("local",), TINKER: ("tinker",), PRIME_RL: ("prime_rl",)},
    Kind.INFERENCE_ENGINE: {LOCAL: ("pytorch",), CORE: ("max", "vllm", "sglang", "mlx", "openai")},
    Kind.RECORDER: {CORE: ("wandb", "tensorboard")},
    Kind.HEALTH_MONITOR: {CORE: ("default",)},
    Kind.PACER: {CORE: ("usl",)},
    Kind.LAUNCHER: {CORE: ("subprocess", "ray")},
    Kind.TEMPLATE: {LOCAL: ("tiny",)},
    Kind.CONFIG_TABLE: {
        SEPA: ("gtpo", "hicra", "sepa", "planning", "logging.strategic_grams"),  # a table, or a key in another's
        REWARDS: ("reward", "environment"),
        CORE: ("inference", "backpressure", "campaign", "squeeze", "health"),
    },
    Kind.COMMAND: {
        CORE: (
            *("trace", "status", "top", "diff", "doctor", "backends", "man", "manual", "migrate-config"),
            *("schema", "compare"),
            *("report", "capacity", "squeeze", "credit", "plugin", "init-plugin", "audit", "score", "resume-check"),
        ),
    },
}

# The default of a key of each kind. Its distribution supplies it; this copy is for messages when that one is missing.
_DEFAULTS: dict[Kind, str] = {
    Kind.ADVANTAGE: "maxrl",
    Kind.TRANSFORM: "gtpo_sepa",
    Kind.UNCERTAINTY: "surprisal",
    Kind.REWARD: "match",
    Kind.DATA_SOURCE: "math",
    Kind.BACKEND: "local",
}


def provider(kind: Kind, name: str) -> str | None:
    """The distribution of ours that provides this name, if any."""
    return next((distribution for distribution, names in _NAMES.get(kind, {}).items() if name in names), None)


def promised_names(kind: Kind) -> tuple[str, ...]:
    """All documented names of a kind."""
    return tuple(name for names in _NAMES.get(kind, {}).values() for name in names)


def promised_default(kind: Kind) -> str:
    """The default name for a key of this kind; empty when there is none."""
    return _DEFAULTS.get(kind, "")


def install_line(distribution: str, extra: str = "") -> str:
    """The command that installs a distribution here: by name, or from the clone that retrain-core was installed from.

    pip fetches a folder's requirements from its index, not from neighbouring folders, so a clone's line names them all.
    """
    suffix = f"[{extra}]" if extra else ""
    core = source_folder(CORE)
    clone = core.parent if core else None
    if clone is None or not (clone / distribution / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(distribution + suffix)}"
    needed = (distribution + suffix, *_missing_siblings(clone / distribution))
    constraints = clone / "constraints.txt"
    options = f"-c {shlex.quote(str(constraints))} " if constraints.is_file() else ""
    return f"pip install {options}{shlex.join(str(clone / name) for name in needed)}"


def left_out(distribution: str) -> str:
    """What to change when `RETRAIN_PLUGINS` or `RETRAIN_BLOCK` leaves a needed distribution out."""
    return f"{distribution} is installed, but RETRAIN_PLUGINS or RETRAIN_BLOCK leaves it out: change that"


def _missing_siblings(folder: Path) -> list[str]:
    """Our own distributions that the one in `folder` requires and this environment lacks."""
    import tomllib  # only an error message needs it

    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = (line.partition("==")[0] for line in project["dependencies"] if line.startswith("retrain-"))
    return [name for name in names if not installed_version(name)]
