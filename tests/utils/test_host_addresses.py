"""A system in its own network namespace: with a host name that nobody knows, with IPv6 only, and without a network.

The page and the metrics are served, and their addresses can be opened.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from transfer_queue.utils.host_addresses import public_host, source_address

PROGRAM = """
import json, sys, urllib.request
import transfer_queue as tq
metrics, live = sys.argv[1:]
tq.init({"metrics": {"enabled": True, "host": metrics}, "live": {"enabled": True, "host": live, "insecure": True}})
addresses = [f"http://{tq.get_metrics_endpoint()}/metrics", tq.get_live_address()]
read = [urllib.request.build_opener(urllib.request.HTTPCookieProcessor).open(each, timeout=60) for each in addresses]
assert [each.status for each in read] == [200, 200]
print(json.dumps([each.split("/")[2].rpartition(":")[0] for each in addresses]))
tq.close()
"""
NETWORK = "ip link add left type veth peer name right; ip link set right up; ip link set left up"
IPV4 = f"{NETWORK}; ip addr add 10.1.2.3/24 dev left; ip route add default via 10.1.2.1"
IPV6 = f"{NETWORK}; ip addr add fd00::5/64 dev left nodad; ip route add default via fd00::1; ip -4 addr flush dev lo"


def in_namespace(setup: str, hosts: Path, *arguments: str) -> str:
    """Return what a program prints on a machine with this network, this /etc/hosts, and a name that nobody knows."""
    unshare = ["unshare", "--user", "--map-root-user", "--net", "--uts", "--mount", "sh", "-ec"]
    prepare = f"hostname no-such-host; mount --bind {hosts} /etc/hosts; ip link set lo up; {setup}"
    try:
        works = subprocess.run([*unshare, prepare], capture_output=True, text=True, timeout=60)
    except FileNotFoundError as error:
        pytest.skip(f"a program is missing: {error}")
    if works.returncode:
        pytest.skip(f"no network namespace can be made here: {works.stderr.strip()}")
    command = [*unshare, f'{prepare}; exec "$@"', "sh", sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("setup", "hosts", "metrics", "live", "expected"),
    [
        (IPV4, "127.0.0.1 localhost", "0.0.0.0", "0.0.0.0", ["10.1.2.3", "10.1.2.3"]),
        (IPV4, "127.0.0.1 localhost\n::1 localhost", "localhost", "::", ["127.0.0.1", "10.1.2.3"]),
        (IPV4, "127.0.0.1 localhost\n10.1.2.3 here", "here", "here", ["10.1.2.3", "here"]),
        (IPV6, "::1 localhost", "localhost", "::", ["[::1]", "[fd00::5]"]),
        (IPV6, "127.0.0.1 localhost\n::1 localhost", "localhost", "localhost", ["[::1]", "localhost"]),
        (":", "127.0.0.1 localhost", "0.0.0.0", "::", ["127.0.0.1", "[::1]"]),
        (":", "127.0.1.1 no-such-host", "0.0.0.0", "0.0.0.0", ["127.0.0.1", "127.0.0.1"]),
    ],
    ids=["unknown name", "both families", "a name", "IPv6 only", "IPv6 only, IPv4 in hosts", "no network", "Debian"],
)
def test_the_addresses_that_a_system_prints_can_be_opened(
    tmp_path: Path, setup: str, hosts: str, metrics: str, live: str, expected: list[str]
) -> None:
    file = tmp_path / "hosts"
    file.write_text(f"{hosts}\n")
    assert json.loads(in_namespace(setup, file, "-W", "ignore", "-c", PROGRAM, metrics, live)) == expected


def test_a_name_that_does_not_resolve_is_an_error_of_the_setting(tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1 localhost\n")
    code = "import transfer_queue as tq\ntry: tq.init({'metrics': {'enabled': True, 'host': 'none.invalid'}})\n"
    said = in_namespace(":", file, "-W", "ignore", "-c", code + "except tq.StartError as error: print(error)")
    assert "metrics cannot be served on port 0 of none.invalid (metrics.port, metrics.host): " in said


def test_a_host_is_written_as_in_a_url() -> None:
    assert [public_host(each) for each in ("10.1.2.3", "node-1", "fd00::1")] == ["10.1.2.3", "node-1", "[fd00::1]"]
    assert source_address("127.0.0.1") == "127.0.0.1"
    assert source_address("none.invalid") is None
