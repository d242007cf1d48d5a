"""Who attends to whom: packed rows of tokens, shared prefixes, pages of keys and values, and the kernels for them."""
