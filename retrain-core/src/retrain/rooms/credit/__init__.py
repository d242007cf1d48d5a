"""Credit assignment: from the scores of a group to one advantage per sampled token."""
