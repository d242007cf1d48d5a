"""The standard fields of a step's line, evaluation included, and their descriptions."""
