"""A system in its own network namespace: with a host name that nobody knows, with IPv6 only, and without a network.

The page and the metrics are served, and their addresses can be opened.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import urllib.request
from collections.abc import Callable
from http.cookiejar import CookieJar
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

import transfer_queue as tq
import warm
from transfer_queue.utils.host_addresses import public_host, source_address

NAMESPACES = 0x10000000 | 0x40000000 | 0x04000000 | 0x00020000
"""CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWUTS and CLONE_NEWNS."""
NETWORK = "ip link add left type veth peer name right; ip link set right up; ip link set left up"
IPV4 = f"{NETWORK}; ip addr add 10.1.2.3/24 dev left; ip route add default via 10.1.2.1"
IPV6 = f"{NETWORK}; ip addr add fd00::5/64 dev left nodad; ip route add default via fd00::1; ip -4 addr flush dev lo"


def in_namespace(setup: str, hosts: str, act: Callable[..., Any], *arguments: str) -> Any:
    """Return what a function returns on a machine with this network, this /etc/hosts, and a name that nobody knows."""
    process, results = warm.reporting(_run_in_namespace, setup, hosts, act, arguments, daemon=False)
    with results:
        refusal, result = results.recv()
    process.join()
    if refusal:
        pytest.skip(f"no network namespace can be made here: {refusal}")
    return result


def _run_in_namespace(
    setup: str, hosts: str, act: Callable[..., Any], arguments: tuple[str, ...], results: Connection[Any, Any]
) -> None:
    user, libc = os.getuid(), ctypes.CDLL(None, use_errno=True)
    if libc.unshare(NAMESPACES):
        results.send((os.strerror(ctypes.get_errno()), None))
        return
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    file = Path(os.environ["TQ_RUNTIME_DIR"], f"hosts-{os.getpid()}")
    file.write_text(f"{hosts}\n")
    prepare = f"hostname no-such-host; mount --bind {file} /etc/hosts; ip link set lo up; {setup}"
    prepared = subprocess.run(["sh", "-ec", prepare], capture_output=True, text=True)
    file.unlink()
    results.send((prepared.stderr, None) if prepared.returncode else ("", act(*arguments)))


def opened_hosts(metrics: str, live: str) -> list[str]:
    """Return the hosts of the addresses that a system prints. Both are opened."""
    on = {"enabled": True, "insecure": True}
    tq.init({"metrics": {"enabled": True, "host": metrics}, "live": on | {"host": live}})
    addresses = [f"http://{tq.get_metrics_endpoint()}/metrics", str(tq.get_live_address())]
    for each in addresses:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        with opener.open(each, timeout=60) as answer:
            assert answer.status == 200
    tq.close()
    return [each.split("/")[2].rpartition(":")[0] for each in addresses]


def start_error(host: str) -> str:
    """Return why metrics cannot be served on a host."""
    with pytest.raises(tq.StartError) as raised:
        tq.init({"metrics": {"enabled": True, "host": host}})
    return str(raised.value)


@pytest.mark.parametrize(
    ("setup", "hosts", "metrics", "live", "expected"),
    [
        (IPV4, "127.0.0.1 localhost\n10.1.2.3 here", "0.0.0.0", "here", ["10.1.2.3", "here"]),
        (IPV4, "127.0.0.1 localhost\n::1 localhost", "localhost", "::", ["127.0.0.1", "10.1.2.3"]),
        (IPV6, "::1 localhost", "localhost", "::", ["[::1]", "[fd00::5]"]),
        (IPV6, "127.0.0.1 localhost\n::1 localhost", "localhost", "localhost", ["[::1]", "localhost"]),
        (":", "127.0.0.1 localhost", "0.0.0.0", "::", ["127.0.0.1", "[::1]"]),
    ],
    ids=["a name", "both families", "IPv6 only", "IPv6 only, IPv4 in hosts", "no network"],
)
def test_the_addresses_that_a_system_prints_can_be_opened(
    setup: str, hosts: str, metrics: str, live: str, expected: list[str]
) -> None:
    assert in_namespace(setup, hosts, opened_hosts, metrics, live) == expected


def test_a_name_of_the_loopback_as_on_debian_is_no_address_for_others() -> None:
    assert in_namespace(":", "127.0.1.1 no-such-host", public_host, "0.0.0.0") == "127.0.0.1"


def test_a_name_that_does_not_resolve_is_an_error_of_the_setting() -> None:
    error = in_namespace(":", "127.0.0.1 localhost", start_error, "none.invalid")
    assert "metrics cannot be served on port 0 of none.invalid (metrics.port, metrics.host): " in error


def test_a_host_is_written_as_in_a_url() -> None:
    assert [public_host(each) for each in ("10.1.2.3", "node-1", "fd00::1")] == ["10.1.2.3", "node-1", "[fd00::1]"]
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("none.invalid") is None
