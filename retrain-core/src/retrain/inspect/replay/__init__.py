"""A stored step again: as it was, to the bit, and under other credit and losses."""
