"""The machine: processor, memory, container limits, files, per-tenant LRU."""
