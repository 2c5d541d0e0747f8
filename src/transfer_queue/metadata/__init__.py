"""BatchMeta and KVBatchMeta describe the samples of a batch, without their values."""

from transfer_queue.metadata.batch_meta import BatchMeta
from transfer_queue.metadata.field_columns import FieldColumn
from transfer_queue.metadata.kv_batch_meta import KVBatchMeta
from transfer_queue.metadata.sample_views import SampleView

__all__ = ["BatchMeta", "FieldColumn", "KVBatchMeta", "SampleView"]
