"""The lightning indexer for Blackwell."""
