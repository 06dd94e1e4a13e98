"""Batch API: uploaded files, batches of requests and their answers, kept on disk by tenant."""
