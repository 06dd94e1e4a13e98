"""The scheduler: running sequences, token budget, tenant fairness, and the batch of a step."""
