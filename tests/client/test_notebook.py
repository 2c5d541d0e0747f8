"""What a client and a configuration show in a notebook, with a system and without one that can be reached."""

from __future__ import annotations

import copy
import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

import transfer_queue as tq
from html_checks import check_html
from transfer_queue.attachment import CURRENT
from transfer_queue.client import TransferQueueClient

EVIL = "<script>alert('x')</script>"


@pytest.fixture(scope="module")
def config() -> Iterator[Any]:
    yield tq.init({"system": {"name": "notebook"}, "controller": {"sampler": tq.RankAwareSampler()}})
    tq.close()


class Unreachable:
    """The address of a controller that does not run, or that never replies."""

    name = EVIL
    key = b"0" * 32
    tls = None
    node = ""
    store = None
    shares_states = True

    def __init__(self, folder: Path, alive: bool = False) -> None:
        self.states = folder
        self.alive = alive
        self.controller = str(folder / "socket")

    def log_of(self, target: Any) -> str:
        return ""

    def start_liveness(self, client_id: str) -> None:
        return None

    def follow_controller(self, session: Any) -> None:
        return None

    def will_return(self) -> bool:
        return self.alive


def test_a_client_shows_the_status_of_its_system(config: Any) -> None:
    client = tq.get_client()
    client.kv_put(EVIL, EVIL, {EVIL: torch.zeros(3)})
    text = check_html(client._repr_html_()).text
    assert text.startswith("TransferQueueClient of the system notebook: 1 partition, 1 sample, ")
    assert f"field{EVIL}1 / 1float32[3]" in text


def test_the_repr_of_a_client_makes_no_request(config: Any) -> None:
    client = tq.get_client()
    client.get_partition_list()
    _, first, second = (client.status().counters["requests"] for _ in range(3))
    assert repr(client) == f"TransferQueueClient(system='notebook', client_id='{client.client_id[:8]}', connected)"
    assert client.status().counters["requests"] - second == second - first


def test_a_client_that_was_closed_says_so(config: Any) -> None:
    client = TransferQueueClient(CURRENT.system)
    assert repr(client) == "TransferQueueClient(system='notebook', not connected yet)"
    client.close()
    assert repr(client) == "TransferQueueClient(system='notebook', closed)"
    text = check_html(client._repr_html_()).text
    assert "The system cannot be reached. NotInitializedError: this client was closed" in text


def test_a_system_that_cannot_be_reached_is_not_an_error(tmp_path: Path) -> None:
    client = TransferQueueClient(Unreachable(tmp_path))
    text = check_html(client._repr_html_()).text
    assert text.startswith(
        f"TransferQueueClient of the system {EVIL}The system cannot be reached. ConnectionLostError:"
    )
    assert len(repr(client)) < 300
    client.close()


def test_a_controller_that_does_not_reply_is_awaited_for_a_short_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer_queue.client.client.DISPLAY_SECONDS", 0.2)
    client = TransferQueueClient(Unreachable(tmp_path, alive=True))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        server.listen()
        text = check_html(client._repr_html_()).text
    assert "The system cannot be reached. WaitTimeoutError: Timeout: the controller at" in text
    client.close()


def test_a_repr_does_not_wait_for_a_lock(config: Any) -> None:
    """A debugger shows a client while another thread connects it."""
    client = tq.get_client()
    with client._lock:
        thread = threading.Thread(target=repr, args=(client,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()


class TestConfiguration:
    def test_it_prints_as_one_line(self, config: Any) -> None:
        assert (
            str(config)
            == repr(config)
            == (
                "ConfigInForce(system='notebook', storage_backend='SimpleStorage', sampler='RankAwareSampler', "
                "polling_mode=False, metrics=False; OmegaConf.to_yaml(config) returns all settings)"
            )
        )

    def test_everything_is_still_there(self, config: Any) -> None:
        assert "num_data_storage_units" in OmegaConf.to_yaml(config)
        assert OmegaConf.to_container(config)["timeouts"]["call"] == config.timeouts.call == config["timeouts"]["call"]
        assert set(config) == set(dict(config)) >= {"controller", "backend", "timeouts"}

    def test_only_what_init_returns_prints_as_one_line(self, config: Any) -> None:
        """A copy, which the user may change, and a section print in full."""
        assert repr(pickle.loads(pickle.dumps(config))) == repr(config)
        assert "'num_data_storage_units': None" in repr(copy.deepcopy(config))
        assert repr(config.metrics) == "{'enabled': False, 'port': 0, 'host': '127.0.0.1', 'compatible_names': False}"

    def test_a_configuration_that_was_cut_is_not_an_error(self, config: Any) -> None:
        cut = pickle.loads(pickle.dumps(config))
        del cut["backend"]
        assert repr(cut) == "ConfigInForce()"

    def test_long_values_are_shortened(self, config: Any) -> None:
        long = pickle.loads(pickle.dumps(config))
        long.controller.sampler = "x" * 10_000
        assert len(repr(long)) < 400
