"""BatchMeta and KVBatchMeta: what a client knows of a batch, without its values."""

from transfer_queue.batch_meta import BatchMeta
from transfer_queue.batch_samples import Sample
from transfer_queue.field_columns import FieldColumn
from transfer_queue.kv_batch_meta import KVBatchMeta

__all__ = ["BatchMeta", "FieldColumn", "KVBatchMeta", "Sample"]
