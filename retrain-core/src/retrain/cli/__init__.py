"""The `retrain` script, and its message where another package has replaced files of this one.

The public package `retrain` has the same import name. Installed after this one it replaces `retrain/__init__.py` and
the script; that then imports its own module `retrain.cli`; Python prefers a package to a module of that name, and so
it ends here.
"""

import sys

import retrain


def main() -> None:
    """Run the command line; if the files around are not retrain-core's, say so and how to repair it."""
    if getattr(retrain, "__distribution__", "") == "retrain-core":
        from retrain.cli.command_line import main as command

        command()
    # This module must work when every other package is damaged, so it needs nothing but Python.
    from retrain.tools.installation import examine

    found = examine()
    print(f"retrain: {found.detail}\n    fix: {found.fix}", file=sys.stderr)
    sys.exit(1)
