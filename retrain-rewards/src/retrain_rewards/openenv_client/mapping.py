"""From the policy's text to an action of the server, by its schema, and from its observation to text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

OF_EVERY_ACTION = "metadata"  # a field that the server adds to all of its actions
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,18})?")
_CASTS = {"string": str, "integer": int, "number": float}


class NoActionError(ValueError):
    """The policy's text holds no action of this kind; the message is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMapping:
    """How a text becomes an action: into one `field` of a `kind` (string, integer, number), or as a JSON object."""

    field: str = ""
    kind: str = ""

    @classmethod
    def of(cls, schema: Mapping[str, Any], field: str = "") -> ActionMapping:
        """For the field that is named, else for the only one that must be given, or the only one; else JSON.

        ValueError when the schema has no field of that name, or one that text cannot fill.
        """
        fields = {name: spec for name, spec in schema.get("properties", {}).items() if name != OF_EVERY_ACTION}
        if field and field not in fields:
            raise ValueError(f"the actions have no field {field!r}, only: {', '.join(fields) or 'none'}")
        required = [name for name in schema.get("required", ()) if name in fields]
        single = required if len(required) == 1 else list(fields) if len(fields) == 1 else []
        name = field or (single[0] if single else "")
        kind = str(fields[name].get("type", "")) if name else ""
        if field and kind not in _CASTS:
            raise ValueError(f"field {field!r} of the actions is no text and no number: let the policy write JSON")
        return cls(field=name, kind=kind) if kind in _CASTS else cls()

    def action(self, text: str) -> dict[str, Any]:
        """The action; a number is the last one in the text, an object goes from its first brace to its last.

        NoActionError when there is none.
        """
        if self.kind == "string":
            return {self.field: text}
        if self.field:
            numbers = _NUMBER.findall(text)
            if not numbers or (self.kind == "integer" and "." in numbers[-1]):
                raise NoActionError(f"error: answer with {'a whole number' if self.kind == 'integer' else 'a number'}")
            return {self.field: _CASTS[self.kind](numbers[-1])}
        try:
            action = json.loads(text[text.find("{") : text.rfind("}") + 1])
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise NoActionError("error: answer with a JSON object")
        return action


def observation_text(observation: Mapping[str, Any], field: str = "") -> str:
    """The field that is named, else the only text in the observation, else all of it as JSON."""
    if field:
        value = observation.get(field, "")
        return value if isinstance(value, str) else json.dumps(value)
    texts = [value for value in observation.values() if isinstance(value, str) and value]
    return texts[0] if len(texts) == 1 else json.dumps(dict(observation))
