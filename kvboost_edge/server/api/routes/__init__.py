"""HTTP routes: each validates its body and calls the module that does the work."""
