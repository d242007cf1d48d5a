"""What a run leaves on disk, written and read: folder, checkpoints, metrics, completions, tokens, identity.

Begin with `record_names.py`, the files; `folder.py` writes them and `run.py` reads them; `identity/` compares code,
data and plugins with those of the run. Imports only the kernel and `text`, so a reader loads nothing that trains.
"""
