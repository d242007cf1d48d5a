"""Split mode: sampling and training on devices of their own, one step of overlap."""
