"""The engine: requests, scheduling, sampling, and the public class `CPUPagedEngine`."""
