"""The data sources, one module for each `[data] source`, and their shared parts `collector.py` and `rows.py`."""
