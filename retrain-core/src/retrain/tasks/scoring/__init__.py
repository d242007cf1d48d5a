"""Scores completions in processes that can be killed, within limits, with three outcomes that are never merged."""
