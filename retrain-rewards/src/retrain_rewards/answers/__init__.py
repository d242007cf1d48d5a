"""Mathematical answers as text: rewritten for math-verify, and judged for form. Begin with `answer.py`."""
