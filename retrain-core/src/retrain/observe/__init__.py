"""Watchers of a run: console, trackers, health monitors, signs of a gamed reward, watchdog, and the names of metrics.

Each folder is a plugin that may be deleted; begin with `metrics/metric_names.py` and `console/step_lines.py`. Imports
nothing of engines, of campaigns or of the packages that read finished runs.
"""
