"""The console output of a run: its lines, and the panel below them on a terminal."""
