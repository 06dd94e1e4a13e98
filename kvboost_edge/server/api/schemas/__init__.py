"""Request schemas, one module per group of routes."""
