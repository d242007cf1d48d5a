"""What the factory of each kind returns: the contracts that built-in and outside plugins share."""
