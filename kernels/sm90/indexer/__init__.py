"""The lightning indexer: scores, top-k, scores at given entries with gradients, and its teacher."""
