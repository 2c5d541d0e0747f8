"""StreamingDataset and StreamingDataLoader: iterate over a rank's batches, micro-batch by micro-batch."""
