"""`retrain replay`: a stored step computed again, to the bit, and under other credit and losses."""
