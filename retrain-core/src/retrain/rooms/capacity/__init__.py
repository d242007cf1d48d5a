"""How much memory and time a configuration needs, and what a run of it took. See `docs/pages/capacity.md`."""
