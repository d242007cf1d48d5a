"""Attention over packed rows with shared prefixes and over paged keys and values, and the kernels for both."""
