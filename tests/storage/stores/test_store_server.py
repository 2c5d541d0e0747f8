"""The address at which the store servers of other nodes reach a node."""

from __future__ import annotations

import pytest

from transfer_queue.errors import StartError
from transfer_queue.net.server.sockets import bind_socket
from transfer_queue.storage.stores.mooncake import own_address
from transfer_queue.storage.stores.store_server import (
    ALONE,
    StoreServerRole,
    check_free,
    free_port,
    is_listening,
    node_address,
)

KEY = "backend.MooncakeStore.local_hostname"
SECOND = StoreServerRole("10.0.0.2", "10.0.0.1:50051")


def test_without_a_setting_it_is_the_address_of_the_node_in_ray() -> None:
    assert node_address(None, SECOND, KEY) == "10.0.0.2"
    assert node_address(None, ALONE, KEY) == ""


def test_a_network_stands_for_the_address_of_each_node_in_it() -> None:
    assert node_address("127.0.0.0/8", SECOND, KEY) == "127.0.0.1"
    assert node_address("127.0.0.1/32", SECOND, KEY) == "127.0.0.1"


def test_a_network_in_which_the_node_has_no_address_is_refused() -> None:
    with pytest.raises(StartError, match=r"node 10\.0\.0\.2 has no address in the network 203\.0\.113\.0/24 \(backend"):
        node_address("203.0.113.0/24", SECOND, KEY)
    with pytest.raises(StartError, match=r"a network such as 10\.2\.0\.0/16, got '10\.0\.0\.1/99'"):
        node_address("10.0.0.1/99", SECOND, KEY)


def test_one_name_for_all_nodes_is_refused_on_those_that_do_not_have_it() -> None:
    with pytest.raises(StartError, match=r"must be an address of each node, but .203\.0\.113\.7. is not an address of"):
        node_address("203.0.113.7", SECOND, KEY)
    with pytest.raises(StartError, match="name the network of the addresses"):
        node_address("203.0.113.7:12001", SECOND, KEY)
    assert node_address("localhost", SECOND, KEY) == "localhost"
    assert node_address("localhost:12001", SECOND, KEY) == "localhost:12001"
    first = StoreServerRole("10.0.0.1")
    assert node_address("name-behind-a-gateway", first, KEY) == "name-behind-a-gateway"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ports_of_a_host_over_both_families(host: str) -> None:
    port = free_port(host)
    check_free(port, KEY, host)
    assert not is_listening(host, port)
    with bind_socket((host, port)):
        assert is_listening(host, port)
        with pytest.raises(StartError, match=f"port {port} of {host} cannot be used"):
            check_free(port, KEY, host)


def test_addresses_of_ipv6() -> None:
    assert node_address("::1/128", SECOND, KEY) == "::1"
    assert node_address("::1", SECOND, KEY) == "::1"
    assert own_address("::1:50051") == "::1"
    with pytest.raises(StartError, match="has no address in the network 2001:db8::/64"):
        node_address("2001:db8::/64", SECOND, KEY)
