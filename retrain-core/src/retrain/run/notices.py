"""Lines about a valid configuration that its author may not expect: keys without effect, and credit that differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from retrain.credit.flow import CreditFlow
from retrain.kernel.config.keys import keys_of
from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.contracts.losses import LossTraits
from retrain.kernel.declared import Kind
from retrain.kernel.registry import Plugins
from retrain.run.check import selected_parts

MODES = ("advantage", "transform")


def credit_notices(config: Config, plugins: Plugins, flow: CreditFlow) -> list[str]:
    """Lines about modes that `algorithm_mode` replaces, and about a transform that changes the user's advantage."""
    return [*_overridden(config, flow), *_weighed(config, plugins, flow)]


def without_effect(config: Config, plugins: Plugins, flow: CreditFlow, tables: Mapping[str, TableEntry]) -> list[str]:
    """Lines about keys that are set and that nothing reads, because their condition is off; one line for each need."""
    parts = {*flow.parts, *(f"{part.kind} {part.name}" for part in selected_parts(config, plugins, tables))}
    found: dict[tuple[str, str], list[str]] = {}
    for table, entry in tables.items():
        for key in keys_of(table, entry.model, entry.traits.flag_prefix):
            is_set = key.path in config.origins and config.value(key.path, key.default) != key.default
            needs = key.needs.split(" or ") if key.needs and is_set else []
            if needs and not any(_is_met(config, need, parts) for need in needs):
                found.setdefault((table, key.needs), []).append(key.name)
    return [f"[{table}] {', '.join(names)}: no effect {_missing(needs)}" for (table, needs), names in found.items()]


def unclipped(config: Config, plugins: Plugins, flow: CreditFlow) -> str:
    """One line if the loss does not clip and a recipe of the advantage's name has one that does; otherwise empty."""
    advantage, loss = flow.advantage.name, config.algorithm.loss
    if config.algorithm.recipe or flow.algorithm or _clips(plugins, loss) is not False:
        return ""
    if not plugins.find(Kind.RECIPE, advantage):
        return ""
    from retrain.credit.recipes import find_recipe

    values = find_recipe(plugins, advantage, where="", search_paths=()).values
    if values.get("algorithm.advantage_mode") != advantage or not _clips(plugins, str(values.get("algorithm.loss"))):
        return ""
    plain = loss.replace("_", " ")
    return f'{advantage} advantage, {plain} without clipping; the clipped algorithm is `recipe = "{advantage}"`'


def _clips(plugins: Plugins, loss: str) -> bool | None:
    """Return whether a loss declares that it clips; None if it declares nothing."""
    traits = plugins.traits_of(Kind.LOSS, loss, LossTraits)
    return traits.clips if traits else None


def _overridden(config: Config, flow: CreditFlow) -> Iterator[str]:
    if flow.algorithm is None:
        return
    default = type(config.algorithm)()
    used = {"advantage": flow.algorithm.advantage_mode, "transform": flow.algorithm.transform_mode}
    for kind in MODES:
        name = f"{kind}_mode"
        value = getattr(config.algorithm, name)
        if value not in (getattr(default, name), used[kind]):
            yield f"[algorithm] {name} = {value!r} has no effect: algorithm_mode = {flow.algorithm.name!r} replaces it"


def _weighed(config: Config, plugins: Plugins, flow: CreditFlow) -> Iterator[str]:
    """An advantage of the user's own, or one per token, whose numbers a transform weighs token by token."""
    spec, transform = flow.advantage, flow.transform
    is_own = not plugins.find(Kind.ADVANTAGE, spec.name) or spec.compute_tokens is not None
    parts = (transform.use_gtpo, transform.apply_hicra, transform.post_process, transform.compute_context)
    if flow.algorithm or not is_own or not any(parts):
        return
    is_default = config.origin("algorithm.transform_mode") == DEFAULT_ORIGIN
    which = f"transform_mode = {transform.name!r}" + (" (the default)" if is_default else "")
    yield (
        f"advantage {spec.name!r} is changed before it is trained on: {which} changes it token by token; "
        'transform_mode = "none" keeps it'
    )


def _is_met(config: Config, need: str, parts: set[str]) -> bool:
    table, _, name = need.partition(".")
    if not name:
        return need in parts
    fields = type(config.tables[table]).model_fields if table in config.tables else {}
    # The plugin that adds this key is not installed.
    if name not in fields:
        return False
    return bool(config.value(need, None) != fields[name].get_default(call_default_factory=True))


def _missing(needs: str) -> str:
    names = needs.split(" or ")
    if any("." not in name for name in names):
        return f"without {needs}"
    shown = (f"[{table}] {key}" for table, _, key in (name.partition(".") for name in names))
    return f"with the default {' and '.join(shown)}"
