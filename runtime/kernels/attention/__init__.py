"""Flash attention: forward, backward, the merge of partial results, and a ring of ranks."""
