"""Forward pass as a table of operations that one kernel call runs."""
