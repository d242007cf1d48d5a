"""How much memory and time a configuration needs, and how much its runs used. See `docs/pages/capacity.md`."""
