"""HTTP routes. Each validates its body and calls the module that does the work."""
