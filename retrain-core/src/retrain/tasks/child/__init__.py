"""A killable process that holds one Python object and answers calls of its methods."""
