"""Whether a difference can be believed: statistics, studies of many runs, forecasts, the ledger of what was looked at.

Begin with `study/study.py` (runs become conditions) and `study/judge.py` (which decides "better"); `wording/` says it
in words. Imports the kernel, `text` and `records`, so that `retrain compare` loads nothing of tasks, credit or a run.
"""
