"""Cache-miss reports, with a request's first diverging token, the cause, the cost and a remedy."""
