"""Tasks that run several requests: embedding, reranking, documents, verification, quality gate."""
