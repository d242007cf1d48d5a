"""Mathematical answers as text: rewritten to what math-verify reads, and judged for form. Begin with `answer.py`."""
