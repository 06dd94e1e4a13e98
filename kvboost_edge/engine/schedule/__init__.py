"""The scheduler: running sequences, token budget, fairness between tenants, and the batch of a step."""
