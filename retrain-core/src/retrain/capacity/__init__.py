"""How much memory and time a configuration needs, before it runs; and what it took, afterwards. See `docs/capacity.md`."""
