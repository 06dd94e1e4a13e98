"""Request schemas, a module for each route."""
