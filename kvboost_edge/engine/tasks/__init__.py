"""Tasks that run several requests, such as embedding, reranking and verification."""
