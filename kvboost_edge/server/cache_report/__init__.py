"""Cache-miss reports: first diverging token, cause, cost and remedy of a request."""
