"""Judges the conditions of runs against each other, and reports the grounds of each verdict."""
