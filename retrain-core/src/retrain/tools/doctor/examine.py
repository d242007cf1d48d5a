"""Collects the findings of every plugin and the problems of the configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.diagnosis import Diagnosis
from retrain.kernel.errors import Problem, RetrainError
from retrain.kernel.registry import Plugins
from retrain.run.check import registered_tables
from retrain.run.configure import DEFAULT_FILE, claim_of, load_with_problems
from retrain.run.selected import selected_parts

HOOK = "retrain_diagnose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The findings for `config`, or for the machine without one; `source` is the file, empty when there is none."""

    config: Config | None
    source: str
    findings: tuple[Diagnosis, ...]

    @property
    def fatal(self) -> tuple[Diagnosis, ...]:
        """The findings that keep the configuration, or without one the installation, from working."""
        return tuple(finding for finding in self.findings if finding.is_fatal)


def examine(arguments: Sequence[str], plugins: Plugins) -> Examination:
    """The findings of all plugins about `[CONFIG] [overrides]`, or about this machine when there is no file.

    A file that trains nothing (a standalone `[squeeze]`) needs no training parts, so only its own problems count.
    ConfigError when the file cannot be read at all.
    """
    if not arguments and not DEFAULT_FILE.is_file():
        return Examination(config=None, source="", findings=tuple(_ask(None, plugins)))
    config, _, problems = load_with_problems(arguments, plugins)
    claim = claim_of(arguments, plugins)
    if claim is not None:
        try:
            claim.load_explain()(arguments, plugins)
        except RetrainError as error:
            known = set(map(str, problems))
            problems += [problem for problem in error.problems if str(problem) not in known]
    trains = claim is None or any(path.startswith("campaign.") for path in config.origins)
    examined = config if trains else None
    reported = _part_problems(examined, plugins)
    findings = [_configuration(problem) for problem in problems if problem.what not in reported]
    return Examination(
        config=examined, source=config.source or "(defaults)", findings=(*findings, *_ask(examined, plugins))
    )


def _part_problems(config: Config | None, plugins: Plugins) -> set[str]:
    """The problems of parts, each of which has its own finding."""
    parts = selected_parts(config, plugins, registered_tables(plugins)) if config else []
    return {part.problem.what for part in parts if part.problem}


def _configuration(problem: Problem) -> Diagnosis:
    detail = f"{problem.where}: {problem.what}" if problem.where else problem.what
    return Diagnosis(name="configuration", status="failed", detail=detail, fix=problem.fix, needed=True)


def _ask(config: Config | None, plugins: Plugins) -> list[Diagnosis]:
    """Ask each plugin separately, so that one that fails does not silence the others."""
    found: list[Diagnosis] = []
    given = {"config": config, "plugins": plugins}
    for hook in reversed(plugins.pluggy.hook.retrain_diagnose.get_hookimpls()):
        try:
            answer: Sequence[Diagnosis] | None = hook.function(*(given[name] for name in hook.argnames))  # type: ignore[assignment]
            found += answer or ()
        except Exception as error:  # a fault of that plugin
            detail = f"{HOOK} raised {type(error).__name__}: {error}"
            fix = "repair that plugin, or leave it out with RETRAIN_BLOCK=distribution"
            found.append(Diagnosis(name=f"plugin {hook.plugin_name}", status="failed", detail=detail, fix=fix))
    return found
