"""Credit assignment: from the scores of a group to one number per sampled token; KL, a teacher, a supervised warm-up.

Begin with `flow.py` (the parts that the file names) and `pipeline.py` (their work on a group). Imports nothing of the
run that calls it.
"""
