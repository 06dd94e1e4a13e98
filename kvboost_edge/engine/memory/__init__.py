"""Memory planning: runner and format selection, pool sizing, the memory check and the report."""
