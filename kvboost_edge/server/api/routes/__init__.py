"""The routes. Each checks its body by a schema and hands over to the module that does the work."""
