"""What several losses share: the base of all, options, labels, embeddings, comparison."""
