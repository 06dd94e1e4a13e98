"""The command line: `kvboost-edge`."""
