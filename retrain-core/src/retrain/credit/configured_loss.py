"""The loss that `[algorithm]` names: checked against the backend without importing either, and found for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from retrain.credit.checks import spec_or_callable, wrong_shape
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.contracts.losses import AGGREGATIONS, LossSpec, LossTraits
from retrain.kernel.declared import Capabilities, Kind, PluginSpec
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.resolve import Found, problem_with, resolve, validated_params
from retrain.kernel.registry import Plugins

KEY, PARAMS = "algorithm.loss", "algorithm.loss_params"
# Keys that a backend must declare to heed, and the values that need nothing of it.
LOSS_KEYS: dict[str, tuple[Any, ...]] = {
    "dual_clip": (0.0,),
    "aggregation": ("", "token_mean"),
    "is_bounds": ([],),
    "off_policy_mask": (0.0,),
    "level": ("sequence",),
}
# The default of clip_eps in the public package, whose resolved configurations write it out.
PUBLIC_CLIP = 0.2
CLIPS = ("algorithm.clip_eps", "algorithm.clip_eps_high")
IS_KEYS = {"algorithm.is_level": "token", "algorithm.is_mode": "truncate"}


def as_loss(found: Found) -> LossSpec:
    target = spec_or_callable(found, LossSpec, "f(ctx) -> one term per token")
    if not isinstance(target, LossSpec):
        return LossSpec(name=found.name, compute=target)
    if target.aggregation not in AGGREGATIONS:
        raise wrong_shape(found, LossSpec, f"averages by {target.aggregation!r}", "one of: " + ", ".join(AGGREGATIONS))
    return target


def find_loss(config: Config, plugins: Plugins) -> tuple[LossSpec, Any]:
    """Import the loss that `[algorithm]` names; return it and its parameters, validated if it has a model."""
    name, given = config.algorithm.loss, dict[str, Any](config.algorithm.loss_params)
    found = resolve(plugins, Kind.LOSS, name, where=config.place(KEY), search_paths=config.plugins.search_paths)
    params, problems = validated_params(found.params, given, where=config.place(PARAMS))
    if problems:
        raise ConfigError(*problems)
    return as_loss(found), given if params is None else params


def check_loss(config: Config, plugins: Plugins) -> list[Problem]:
    """Problems with the name of the loss, with its backend and parameters, and with keys that would have no effect."""
    backend = config.backend.backend
    if plugins.find(Kind.BACKEND, backend) and not applicable_losses(plugins, backend):
        # This backend takes no loss from here, and refuses the keys about it by itself.
        return []
    found = [*_weight_problems(config), *_unheeded(config, plugins)]
    name, where = config.algorithm.loss, config.place(KEY)
    spec = _spec(plugins, name)
    if not _is_own(config, plugins):
        if problem := problem_with(plugins, Kind.LOSS, name, where=where, search_paths=config.plugins.search_paths):
            return [problem, *found]
        if problem := _inapplicable(config, plugins, spec):
            return [problem, *found]
    is_refused = any("dual_clip" in problem.where for problem in found)
    if config.algorithm.dual_clip and spec and not is_refused and not _traits(spec).dual_clip:
        what, fix = f"has no effect: the loss {name!r} has no second clip", 'use loss = "ppo", or remove it'
        found.append(Problem(code="loss.no-dual-clip", where=config.place("algorithm.dual_clip"), what=what, fix=fix))
    if config.algorithm.level == "turn" and spec and _traits(spec).credit == "token" and not found:
        what, fix = f"has no effect: the loss {name!r} takes its ratio by token", 'use loss = "gspo", or remove it'
        found.append(Problem(code="loss.no-level", where=config.place("algorithm.level"), what=what, fix=fix))
    return [*found, *_param_problems(config, spec)]


def check_clips(config: Config, plugins: Plugins) -> list[Problem]:
    """Problems with a clip that has no effect: the loss is the default, or declares that it does not clip.

    The resolved configuration of the public package writes every key out, and with it a default that is not 0.
    """
    name = config.algorithm.loss
    if config.origin(KEY) == DEFAULT_ORIGIN:
        given = [path for path in CLIPS if config.origin(path) != DEFAULT_ORIGIN]
        which = f"the default loss, {name},"
    else:
        spec = _spec(plugins, name)
        values = {path: value for path in CLIPS if (value := config.value(path, 0.0))}
        is_written_out = values == {CLIPS[0]: PUBLIC_CLIP} and config.origin(CLIPS[1]) != DEFAULT_ORIGIN
        given = [] if spec is None or _traits(spec).clips or is_written_out else list(values)
        which = f"the loss {name!r}"
    what = f"has no effect: {which} does not clip"
    fix = 'write loss = "ppo" (or "cispo") as well, or remove it'
    return [Problem(code="loss.no-clip", where=config.place(path), what=what, fix=fix) for path in given]


def selected_loss(config: Config, plugins: Plugins) -> str:
    """The loss that a configuration names itself; empty for the default, and for one that the backend has built in."""
    is_set = config.origin(KEY) != DEFAULT_ORIGIN and not _is_own(config, plugins)
    return config.algorithm.loss if is_set else ""


def applicable_losses(plugins: Plugins, backend: str) -> list[str]:
    """The losses that a backend can apply: its own, and the registered ones that name it."""
    capabilities = plugins.traits_of(Kind.BACKEND, backend, Capabilities)
    own = capabilities.losses if capabilities else frozenset()
    return sorted({*own, *(e.spec.name for e in plugins.registered(Kind.LOSS) if backend in _traits(e.spec).backends)})


def capability_fields(capabilities: Capabilities | None, backend: str, plugins: Plugins) -> dict[str, Any]:
    """A backend's capabilities as JSON, with every loss that it can apply; empty when they are not known."""
    if capabilities is None:
        return {}
    fields = {
        name: sorted(value) if isinstance(value, frozenset) else value for name, value in asdict(capabilities).items()
    }
    return {**fields, "losses": applicable_losses(plugins, backend)}


def _unheeded(config: Config, plugins: Plugins) -> Iterable[Problem]:
    capabilities = plugins.traits_of(Kind.BACKEND, config.backend.backend, Capabilities)
    if capabilities is None:
        return
    for name, harmless in LOSS_KEYS.items():
        value = config.value(f"algorithm.{name}", harmless[0])
        if value in harmless or name in capabilities.loss_keys:
            continue
        backends = (each.spec for each in plugins.registered(Kind.BACKEND))
        able = [spec.name for spec in backends if name in getattr(spec.traits, "loss_keys", ())]
        what = f"{name} = {value!r} would have no effect: backend {config.backend.backend!r} does not apply it"
        fix = "remove it" + (f', or use backend = "{able[0]}"' if able else "")
        yield Problem(code="backend.ignored-key", where=config.place(f"algorithm.{name}"), what=what, fix=fix)


def _is_own(config: Config, plugins: Plugins) -> bool:
    capabilities = plugins.traits_of(Kind.BACKEND, config.backend.backend, Capabilities)
    return capabilities is not None and config.algorithm.loss in capabilities.losses


def _inapplicable(config: Config, plugins: Plugins, spec: PluginSpec | None) -> Problem | None:
    """The reason why the backend cannot apply an existing loss; a dotted path fits any backend with plugins' losses."""
    backend, name = config.backend.backend, config.algorithm.loss
    if not plugins.find(Kind.BACKEND, backend):
        return None  # reported as such
    taking = (_traits(each.spec).backends for each in plugins.registered(Kind.LOSS))
    able = _traits(spec).backends if spec else frozenset().union(*taking)
    if backend in able:
        return None
    losses = applicable_losses(plugins, backend)
    others = {each.spec.name: each.spec.traits for each in plugins.registered(Kind.BACKEND)}
    able |= {each for each, traits in others.items() if isinstance(traits, Capabilities) and name in traits.losses}
    # A clipped loss is the safer suggestion where the backend has one.
    nearest = next((each for each in ("ppo", *losses) if each in losses), "importance_sampling")
    what = f"backend {backend!r} cannot apply the loss {name!r}"
    why = f"it can apply {_listed(losses)}; {name!r} is for {_listed(sorted(able), 'backend ')}"
    fix = f'use loss = "{nearest}"' + (f', or [backend] backend = "{min(able)}"' if able else "")
    return Problem(code="loss.not-for-backend", where=config.place(KEY), what=what, why=why, fix=fix)


def _param_problems(config: Config, spec: PluginSpec | None) -> list[Problem]:
    name, where, given = config.algorithm.loss, config.place(PARAMS), config.algorithm.loss_params
    try:
        model = spec.load_params() if spec else None
    # The parameters are imported here for the first time, so anything may go wrong in the plugin.
    except Exception as error:
        what = f"the parameters of loss {name!r} failed to load: {type(error).__name__}: {error}"
        fix = "repair or reinstall the distribution that provides it"
        return [Problem(code="plugin.broken-params", where=where, what=what, fix=fix)]
    if given and model is None and (spec is not None or "." not in name):
        what, fix = f"the loss {name!r} takes no parameters", "remove loss_params"
        return [Problem(code="loss.takes-no-params", where=where, what=what, fix=fix)]
    return validated_params(model, given, where=where)[1]


def _weight_problems(config: Config) -> Iterable[Problem]:
    """Problems with the importance weight: `is_level` and `is_mode` need `is_bounds`, and `tis_cap` excludes it."""
    bounds, cap = config.algorithm.is_bounds, config.algorithm.tis_cap
    if bounds and cap > 0.0:
        what = "is set together with tis_cap"
        why = "both weigh the mismatch of sampler and trainer: it would count twice"
        fix = f"remove one: tis_cap = {cap:g} is is_bounds = [0.0, {cap:g}]"
        yield Problem(code="loss.two-weights", where=config.place("algorithm.is_bounds"), what=what, why=why, fix=fix)
    for path, default in IS_KEYS.items():
        if not bounds and config.value(path, default) != default:
            why = "tis_cap is by token and truncates" if cap > 0.0 else ""
            what, fix = "has no effect without is_bounds", "set is_bounds = [0.0, 2.0], or remove it"
            yield Problem(code="loss.needs-bounds", where=config.place(path), what=what, why=why, fix=fix)


def _spec(plugins: Plugins, name: str) -> PluginSpec | None:
    entries = plugins.find(Kind.LOSS, name)
    return entries[0].spec if len(entries) == 1 else None


def _traits(spec: PluginSpec | None) -> LossTraits:
    traits = spec.traits if spec else None
    return traits if isinstance(traits, LossTraits) else LossTraits(backends=frozenset())


def _listed(names: list[str], prefix: str = "") -> str:
    return prefix + ", ".join(map(repr, names)) if names else "none that is installed"
