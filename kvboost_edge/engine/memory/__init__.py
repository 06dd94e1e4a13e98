"""Memory: selection of runner and formats, pool sizing, the memory check and the memory report."""
