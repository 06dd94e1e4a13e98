"""Request schemas, one module for each group of routes."""
