"""The files of a run, written and read: folder, checkpoints, metrics, completions, tokens, identity.

Begin with `record_names.py`, the files; `folder.py` writes them and `run.py` reads them; `identity/` compares code,
data and plugins with a run's. Imports only the kernel and `text`, so a reader loads nothing that trains.
"""
