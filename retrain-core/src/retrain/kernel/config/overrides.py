"""Parses the command-line flags and environment variables that set a key into `Override`s."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from retrain.kernel.config.keys import Key
from retrain.kernel.config.resolved import Layer, Origin
from retrain.kernel.errors import Problem

ENV_PREFIX = "RETRAIN__"
PARAM_FLAGS = {
    "--backend-opt": "backend.options",
    "--data-opt": "data.options",
    "--algorithm-param": "algorithm.params",
    "--advantage-param": "algorithm.advantage_params",
    "--transform-param": "algorithm.transform_params",
}
FLAG_ALIASES = {"--resume": "resume.from"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A textual value for `table.key`; with `entry`, for one entry of the table stored under that key."""

    path: str
    text: str
    origin: Origin
    entry: str = ""


def from_environment(environ: Mapping[str, str], keys: Sequence[Key]) -> tuple[list[Override], list[Problem]]:
    """`RETRAIN__TRAINING__LR=1e-4` sets `[training] lr`."""
    paths = {key.path.upper().replace(".", "__"): key.path for key in keys}
    overrides, problems = [], []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            continue
        path = paths.get(name.removeprefix(ENV_PREFIX).upper())
        if path is None:
            near = get_close_matches(name.removeprefix(ENV_PREFIX).upper(), paths, n=1)
            fix = f"use {ENV_PREFIX}{near[0]}" if near else f"unset {name}"
            problems.append(Problem(where=f"environment variable {name}", what="sets no known key", fix=fix))
        else:
            origin = Origin(layer=Layer.ENVIRONMENT, place=name)
            overrides.append(Override(path=path, text=environ[name], origin=origin))
    return overrides, problems


def from_arguments(arguments: Sequence[str], keys: Sequence[Key]) -> tuple[list[Override], list[Problem]]:
    """`--flag value`, `--flag=value`, `--set table.key=value`, repeatable `--*-param k=v`; later ones win."""
    flags = {f"--{key.flag}": key.path for key in keys} | FLAG_ALIASES
    switches = {f"--{key.flag}" for key in keys if key.annotation is bool}
    overrides: list[Override] = []
    problems: list[Problem] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag == "--":
            problems.append(Problem(where="command line", what=f"unexpected argument {word!r}", fix="remove it"))
            continue
        if flag not in flags and flag not in PARAM_FLAGS and flag != "--set":
            problems.append(_unknown_flag(flag, flags))
            if not equals and rest and not rest[0].startswith("--"):
                rest.pop(0)  # its value, not a second problem
            continue
        if not equals:
            if flag in switches and (not rest or rest[0].startswith("--")):
                rest.insert(0, "true")  # `--resume-anyway` without a value
            if not rest or (rest[0].startswith("--") and not _is_number(rest[0])):
                problems.append(Problem(where="command line", what=f"{flag} needs a value", fix=f"write {flag}=VALUE"))
                continue
            value = rest.pop(0)
        result = _override(flag, value, flags, {key.path for key in keys})
        (overrides if isinstance(result, Override) else problems).append(result)  # type: ignore[arg-type]
    return overrides, problems


def _override(flag: str, value: str, flags: Mapping[str, str], paths: set[str]) -> Override | Problem:
    origin = Origin(layer=Layer.COMMAND_LINE, place=flag)
    if flag in flags:
        return Override(path=flags[flag], text=value, origin=origin)
    name, equals, text = value.partition("=")
    if not equals or not name.strip():
        return Problem(where="command line", what=f"{flag} {value!r} is not name=value", fix=f"write {flag} name=value")
    name = name.strip()
    if flag in PARAM_FLAGS:
        return Override(path=PARAM_FLAGS[flag], entry=name, text=text, origin=origin)
    if name in paths:
        return Override(path=name, text=text, origin=origin)
    parent, _, entry = name.rpartition(".")
    if parent in paths:  # one entry of a free table: --set algorithm.transform_params.cap=0.1
        return Override(path=parent, entry=entry, text=text, origin=origin)
    near = get_close_matches(name, paths, n=1)
    fix = f"use {near[0]}" if near else "`retrain explain --keys` lists every key"
    return Problem(where="command line", what=f"--set names an unknown key {name!r}", fix=fix)


def _unknown_flag(flag: str, flags: Mapping[str, str]) -> Problem:
    wanted = flag.removeprefix("--").replace("-", "_")  # of --schedule and --optimizer-schedule the key is known
    near = [each for each, path in flags.items() if wanted in (path.replace(".", "_"), path.partition(".")[2])]
    near = near or get_close_matches(flag, [*flags, *PARAM_FLAGS, "--set"], n=1, cutoff=0.5)
    fix = f"did you mean {' or '.join(near)}?" if near else "`retrain explain --keys` lists every flag"
    return Problem(where="command line", what=f"unknown flag {flag}", fix=fix)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
