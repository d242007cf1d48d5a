"""Runs that anybody can repeat: one file with all that a run or campaign was made of, and its rerun."""
