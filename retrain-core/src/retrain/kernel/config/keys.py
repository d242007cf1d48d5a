"""Defines the keys of a TOML table: type, default, range, flag, and whether the feature exists yet."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from retrain.kernel.declared import Kind


class Table(BaseModel):
    """Base of every TOML table: unknown keys are errors, types are strict (the text "false" is not a boolean)."""

    # Infinity would pass a range with one bound, and become NaN in the first step that computes with it.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, populate_by_name=True)


def key(
    default: Any,
    description: str,
    *,
    flag: str | None = None,
    names: Kind | None = None,
    selects: tuple[Kind, str] | None = None,
    pending: str | None = None,
    aliases: tuple[str, ...] = (),
    free_on_resume: bool = False,
    reads: str | None = None,
    needs: str = "",
    is_path: bool = False,
    auto: tuple[float, float] | None = None,
    **constraints: Any,
) -> Any:
    """One key of a table.

    `flag` overrides the command-line flag made from table prefix and key. `names`: the value names a plugin of that
    kind; `{names}` in the description becomes the registered ones. `selects`: any non-empty value selects that part.
    `pending` describes a feature that is not built: any value but the default is refused with that text.
    `free_on_resume`: a resumed run may have another value and still be the same run. `reads`: the value names an input
    of the run whose content is hashed: `code` (a module or `.py` file), `data` (a file, folder or pattern), `package`
    (an installed environment), `model` (as `[model] model`) or `adapter` (its folder, or a run). `needs`: the key is
    read only with another key off its default (`eval.examples`), or by a part in use (`KIND NAME`); several joined by `
    or `. `is_path`: the value is a path whose content is not part of the run, such as a folder that it writes. A run
    records the place of every path, for whatever opens the run later. `auto`: the text "auto" is a value, too, and
    becomes the first of these with an adapter, the second when all weights are trained. `constraints` are pydantic's
    (`ge`, ...).
    """
    extra: Any = {"flag": flag, "names": names, "selects": selects, "pending": pending, "aliases": aliases}
    extra |= {"free_on_resume": free_on_resume, "reads": reads, "needs": needs, "is_path": is_path, "auto": auto}
    if isinstance(default, dict | list):
        return Field(default_factory=default.copy, description=description, json_schema_extra=extra, **constraints)
    return Field(default, description=description, json_schema_extra=extra, **constraints)


share = partial(key, ge=0.0, le=1.0)  # a fraction
free = partial(key, free_on_resume=True)  # a resumed run may have another value
# A plain pydantic field lacks them.
MARKS = ("names", "selects", "pending", "aliases", "free_on_resume", "needs", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    table: str
    name: str
    flag: str
    annotation: Any
    default: Any
    description: str
    names: Kind | None = None
    selects: tuple[Kind, str] | None = None
    pending: str = ""
    aliases: tuple[str, ...] = ()
    free_on_resume: bool = False
    needs: str = ""
    auto: tuple[float, float] | None = None

    @property
    def path(self) -> str:
        """`table.key`, as `--set` takes it."""
        return f"{self.table}.{self.name}"


# One command asks for the same tables dozens of times, and pydantic takes its time to make the defaults.
@lru_cache(maxsize=256)
def keys_of(table: str, model: type[BaseModel], flag_prefix: str = "") -> tuple[Key, ...]:
    return tuple(_key(table, name, info, flag_prefix) for name, info in model.model_fields.items())


def _key(table: str, field_name: str, info: FieldInfo, flag_prefix: str) -> Key:
    extra: Any = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
    # `from` is a keyword of Python, so the field of `[resume] from` has an alias.
    name = info.alias or field_name
    return Key(
        table=table,
        name=name,
        flag=str(extra.get("flag") or f"{flag_prefix}{name}").replace("_", "-"),
        annotation=info.annotation,
        default=info.get_default(call_default_factory=True),
        description=info.description or "",
        **{name: extra[name] for name in MARKS if extra.get(name)},
    )
