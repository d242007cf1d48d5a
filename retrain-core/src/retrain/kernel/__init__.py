"""The kernel: one step, one run, the contracts of its parts, and how a name in a TOML becomes a part.

It imports only the standard library and `LIBRARIES`, even inside functions. The libraries of a package load when it is
used.
"""

LIBRARIES = ("importlib_metadata", "numpy", "packaging", "pluggy", "pydantic", "tomli_w")
