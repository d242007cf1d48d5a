"""Campaigns: conditions x seeds from one file, each run in a process and a folder of its own; here, on Ray or Slurm.

Begin with `plan.py` (the grid), `schedule.py` (who runs when) and `session.py` (what the command does). Imports
`verdicts`, which decides when enough seeds have run; what draws pages stands above it.
"""
