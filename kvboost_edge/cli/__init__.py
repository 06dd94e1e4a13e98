"""Command line interface, `kvboost-edge`."""
