"""Queues between processes: drop-ins for `queue.Queue`, `multiprocessing.Queue` and `ray.util.queue.Queue`."""

from transfer_queue.errors import QueueEmptyError as Empty
from transfer_queue.errors import QueueFullError as Full
from transfer_queue.errors import QueueShutDownError as ShutDown
from transfer_queue.queues.fifo_queue import Queue
from transfer_queue.queues.leased_item import LeasedItem
from transfer_queue.queues.ordered_queues import LifoQueue, PriorityQueue

__all__ = ["Empty", "Full", "LeasedItem", "LifoQueue", "PriorityQueue", "Queue", "ShutDown"]
