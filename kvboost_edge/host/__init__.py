"""The host machine: processor, memory, container limits and files; and a per-tenant LRU cache."""
