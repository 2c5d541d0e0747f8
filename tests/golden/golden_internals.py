"""Everything that the golden files' generator and tests use of the package beside its public interface.

A module or a name that moves is changed here, and nowhere else in this folder.
"""

from tests.simulation import faulty_cluster
from tests.simulation.faulty_cluster import CLOCK, FaultyCluster
from transfer_queue.core import context as departures
from transfer_queue.core.controller import RECORDS
from transfer_queue.core.events.records import BlocksMoved as Moved
from transfer_queue.core.events.records import RequestParked as Parked
from transfer_queue.core.events.records import StateLoaded, Unparked
from transfer_queue.core.state.serialization import load_state as restored
from transfer_queue.core.state.serialization import save_state as saved
from transfer_queue.core.tables import changes as change_feed
from transfer_queue.core.units import migration_planner
from transfer_queue.journal import state_file
from transfer_queue.journal.journal import recover
from transfer_queue.journal.segment import JournalRecord, Reading
from transfer_queue.messages.reports.timeline import Introduce
from transfer_queue.net.calls import CONTROLLER
from transfer_queue.storage.arena.arena import Arena
from transfer_queue.testing.cluster import arena_of

__all__ = [
    "CLOCK", "CONTROLLER", "RECORDS", "Arena", "FaultyCluster", "Introduce", "JournalRecord", "Moved", "Parked",
    "Reading", "StateLoaded", "Unparked", "arena_of", "change_feed", "departures", "faulty_cluster",
    "migration_planner", "recover", "restored", "saved", "state_file",
]  # fmt: skip
