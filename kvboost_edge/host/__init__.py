"""The machine: processor, thread team, memory and the limits of its control groups."""
