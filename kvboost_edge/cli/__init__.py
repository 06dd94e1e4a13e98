"""What a person touches: the `kvboost-edge` command."""
