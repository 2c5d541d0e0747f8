"""StreamingDataset and StreamingDataLoader: a rank's batches, micro-batch by micro-batch."""
