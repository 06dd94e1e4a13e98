"""The scheduler with its token budget, tenant fairness, step pacing and batch construction."""
