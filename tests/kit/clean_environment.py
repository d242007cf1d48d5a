"""The environment in which tests run and which they hand to what they start: nothing that a person has set.

An activated virtual environment, a coloured prompt, a Turkish locale, a tracker's settings or those of a CI service
would otherwise decide what a program prints, which plugins it loads, or how it trains.
"""

import re
from collections.abc import Mapping

# Prompt and shell; interpreters and virtual environments; ours; trackers and hubs; threads; language; colours and
# width; continuous integration.
PERSONAL = re.compile(
    r"PS[0-4]|PROMPT_COMMAND|INPUTRC|BASH_ENV|ENV"
    r"|VIRTUAL_ENV\w*|CONDA_\w+|PYTHON\w*|PYTEST_ADDOPTS|PYTEST_PLUGINS|PY_COLORS"
    r"|RETRAIN\w*|WANDB\w*|HF_\w+|HUGGING\w+|TRANSFORMERS_\w+"
    r"|OMP_\w+|MKL_\w+|OPENBLAS_\w+|TOKENIZERS_PARALLELISM"
    r"|LANG|LANGUAGE|LC_\w+"
    r"|NO_COLOR|FORCE_COLOR|CLICOLOR\w*|COLORTERM|TTY_\w+|COLUMNS|LINES"
    r"|CI|CONTINUOUS_INTEGRATION|GITHUB_\w+|GITLAB_\w+|BUILDKITE\w*|JENKINS_\w+|TRAVIS\w*|CIRCLECI"
)
# `nox -s server-...` names the interpreters of servers in these; benchmarks and MLX have one as well, and `nox -s real`
# the folder of its model, the sessions `referee` and `prime-rl` checkouts of other trainers.
PEERS = r"RETRAIN_(VERL|PRIME_RL|STABLE_RL|AREAL)"
OF_THE_TESTS = re.compile(r"RETRAIN(_TEST)?_(VLLM|SKYRL|MAX|TRL|MLX)_PYTHON|RETRAIN_(SMOLLM2|MUTANT)|" + PEERS)
# One test per core at a time, each with one thread: two threads of two processes only wait for each other.
OURS = {"OMP_NUM_THREADS": "1"}


def is_personal(name: str) -> bool:
    """Whether a variable belongs to the person who started the tests, and not to the machine or to the tests."""
    return bool(PERSONAL.fullmatch(name)) and not OF_THE_TESTS.fullmatch(name)


def cleaned(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` without what is personal, and with what every test has."""
    return {name: value for name, value in environ.items() if not is_personal(name)} | OURS
