"""One training run on this machine: its parts assembled, its steps, samplers and pacing, resume, signals.

Begin with `session.py`, which a command calls, and `assemble.py`; a killed run comes back in `restore.py`, by
the plan of `resume_plan.py`. Imports what stands below it, and nobody who watches: they come through hooks.
"""
