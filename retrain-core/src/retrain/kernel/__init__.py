"""The kernel: one step, one run, the contracts of its parts, and how a name in a TOML becomes a part.

Besides the standard library it imports `LIBRARIES` and nothing else, not even inside a function; the libraries of a
package load when it is used.
"""

LIBRARIES = ("importlib_metadata", "numpy", "packaging", "pluggy", "pydantic", "tomli_w")
