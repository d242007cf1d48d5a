"""Classes that differ from a sound one in a method or two, and functions that make objects with one fault."""


def variant(base, **members):
    """Return a subclass with these methods or attributes in place of its own; call the base by its name."""
    return type(f"{base.__name__} with {', '.join(members)}", (base,), members)
