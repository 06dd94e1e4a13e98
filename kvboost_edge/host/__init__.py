"""Host machine: processor, memory, container limits and files, plus an LRU cache by tenant."""
