"""Tasks of several requests: embedding, reranking, documents, verification and quality gate."""
