"""Tells the controller that a store server runs, on a connection that ends together with the server's process."""

from __future__ import annotations

import contextlib
import logging
import select
import threading
import time
import uuid
from typing import TYPE_CHECKING

from transfer_queue.errors import TransferQueueError
from transfer_queue.messages.reports.store_reports import ReportStoreServer
from transfer_queue.net.drivers.connection import Address, Connection
from transfer_queue.net.session import Session, raise_failure

if TYPE_CHECKING:
    import ssl

CALL_SECONDS = 30.0  # for which the controller's reply is awaited
RETRY_SECONDS = 0.1  # between two attempts to reach the controller
LOOK_SECONDS = 0.5  # between two checks whether it should stop

logger = logging.getLogger(__name__)


class StoreReporter:
    """Keeps a connection to the controller from a thread of its own, until `stop` or the end of the process."""

    def __init__(self, controller: Address, key: bytes, tls: ssl.SSLContext | None, report: ReportStoreServer) -> None:
        self._controller = controller
        self._report = report
        name = f"store-{report.backend}-{uuid.uuid4().hex}"
        self._session = Session(name, key, lambda target: controller, role="unit", tls=tls)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="report the store server", daemon=True)

    def start(self) -> None:
        """Begin to report."""
        self._thread.start()

    def stop(self) -> None:
        """End the connection: the controller then knows that the server has ended."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            connection = Connection(self._controller)
            try:
                self._tell(connection)
                self._await_end(connection)
            except (OSError, TransferQueueError) as error:
                logger.info("the store server reports itself again, because the controller is gone: %s", error)
            finally:
                connection.close()
            self._stopped.wait(RETRY_SECONDS)

    def _tell(self, connection: Connection) -> None:
        deadline, its = time.monotonic() + CALL_SECONDS, self._session
        connection.connect(self._controller, its.role, its.client_id, its.key, deadline, its.tls)
        sequence, frame = its.begin_request(self._report)
        try:
            raise_failure(its.decode_reply(connection.exchange(frame, deadline)).body)
        finally:
            its.finish(sequence)

    def _await_end(self, connection: Connection) -> None:
        """Return when `stop` was called. Raises OSError when the controller has closed the connection."""
        while not self._stopped.is_set():
            if select.select([connection.sock], [], [], LOOK_SECONDS)[0]:
                with contextlib.suppress(BlockingIOError):
                    connection.read(time.monotonic() + CALL_SECONDS)
