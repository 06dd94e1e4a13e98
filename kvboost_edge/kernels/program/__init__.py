"""Forward pass as a table of operations, executed by one kernel call."""
