"""`python -m retrain`: the `retrain` script where it is not on the path."""

from retrain.cli import main

if __name__ == "__main__":
    main()
