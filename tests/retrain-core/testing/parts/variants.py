"""Classes that differ from a sound one in a method or two, and functions that make objects with one fault."""

from __future__ import annotations

from typing import Any


def variant(base: type, **members: Any) -> Any:
    """Return a subclass with these methods or attributes in place of its own; call the base by its name."""
    return type(f"{base.__name__} with {', '.join(members)}", (base,), members)
