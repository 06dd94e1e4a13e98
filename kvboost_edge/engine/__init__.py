"""The engine: requests, scheduling, sampling and the public face `CPUPagedEngine`."""
