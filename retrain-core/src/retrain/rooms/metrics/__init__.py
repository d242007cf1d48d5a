"""The fields of a step's line, and the records of its completions."""
