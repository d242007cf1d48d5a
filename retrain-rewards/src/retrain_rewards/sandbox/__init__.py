"""Where programs of completions run: bubblewrap around a bare interpreter, and what runs inside it.

Begin with `process.py`, the side of the scoring process. `start`, `inside`, `functions`, `checks`, `link` and `values`
are sent into the sandbox, and import nothing but each other.
"""
