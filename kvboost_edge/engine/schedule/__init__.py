"""The scheduler: running sequences, token budget, tenant fairness, the batch of a step."""
