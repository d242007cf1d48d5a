"""Where tasks come from: one module for each `[data] source`, and what they share in `collector.py` and `rows.py`."""
