"""The kernel: one step, one run, the contracts of its parts, and how a name in a TOML becomes a part.

Beside the standard library it imports what stands here and nothing else, not even inside a function; the libraries of a
room load when the room is used.
"""

LIBRARIES = ("importlib_metadata", "numpy", "packaging", "pluggy", "pydantic", "tomli_w")
