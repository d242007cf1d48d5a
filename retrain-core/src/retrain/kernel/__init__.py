"""The kernel: one step, one run, the contracts of its parts, and how a name in a TOML becomes a part."""
