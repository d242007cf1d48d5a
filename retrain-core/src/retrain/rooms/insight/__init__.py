"""Inspects flows and runs: preflight, credit of stored completions, status, comparison, report."""
