"""Small managers and a model of the block pool."""
