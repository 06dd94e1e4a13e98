"""`kvboost-edge launch`: other programs, pointed at a running server."""
