"""The kinds of plugin that can be generated, and their names on the command line."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Kind

KINDS = (
    *(Kind.ADVANTAGE, Kind.TRANSFORM, Kind.UNCERTAINTY, Kind.REWARD, Kind.BACKEND, Kind.INFERENCE_ENGINE),
    *(Kind.DATA_SOURCE, Kind.ALGORITHM, Kind.PLANNING_DETECTOR, Kind.ENVIRONMENT, Kind.RECORDER, Kind.LAUNCHER),
    *(Kind.LOSS, Kind.RECIPE, Kind.SAMPLER),
)
SHORT = {"planning": Kind.PLANNING_DETECTOR, "data": Kind.DATA_SOURCE, "inference": Kind.INFERENCE_ENGINE}
IN_WHEEL = Path(__file__).parent / "templates"
IN_REPOSITORY = Path(__file__).parents[5] / "templates"  # an editable install reads them from the repository


def slug(kind: Kind) -> str:
    """The kind as the command line and its template folder spell it: `data source` -> `data-source`."""
    return kind.value.replace(" ", "-")


def kind_of(text: str) -> Kind:
    """The kind that `--kind` names; ConfigError suggesting the nearest one otherwise."""
    wanted = text.strip().lower().replace("_", "-").replace(" ", "-")
    known = {slug(kind): kind for kind in KINDS} | SHORT
    if wanted in known:
        return known[wanted]
    near = get_close_matches(wanted, known, n=1)
    every = ", ".join(map(slug, KINDS))
    fix = f"did you mean {near[0]!r}?" if near else "use one of these"
    raise ConfigError(
        Problem(where="--kind", what=f"no kind of plugin is called {text!r}", why=f"kinds: {every}", fix=fix)
    )


def template(name: str) -> Path:
    """Folder of the cookiecutter template of a kind, or of `distribution`, which all kinds share."""
    for folder in (IN_WHEEL, IN_REPOSITORY):
        if (folder / name / "cookiecutter.json").is_file():
            return folder / name
    what = f"the template {name!r} is missing from {IN_WHEEL}"
    raise ConfigError(Problem(what=what, fix="reinstall retrain-core"))
