"""Judges the conditions of runs against each other, and says what a verdict rests on."""
