"""`tq live`: show a system, or a snapshot of one, in a browser until Ctrl-C; `tq live --save`: write a snapshot."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from transfer_queue.cli.options import Commands, add_name, add_tokenizer, find_system, whole_number_type
from transfer_queue.errors import InvalidArgumentError, StartError

if TYPE_CHECKING:
    from transfer_queue.config.settings import Settings
    from transfer_queue.live.serving.live_server import LiveOptions
    from transfer_queue.live.snapshot import LiveSnapshot
    from transfer_queue.node.system.launcher import RunningSystem

WITHOUT = {"save": ("host", "port", "values", "tokenizer", "open"), "snapshot": ("save", "name", "values", "tokenizer")}
"""Argument -> the options that have no meaning with it."""


def add(commands: Commands) -> None:
    """Add the command to the parser of `tq`."""
    command = commands.add_parser(
        "live", help="show a running system, or a snapshot of one, in a browser",
        description="Serves a page that shows where the training waits, until Ctrl-C, and prints its address. Everyone "
        "who knows the address can see the page. Needs the extra [live]. From another machine, forward the port with "
        "`ssh -L PORT:127.0.0.1:PORT`.",
    )  # fmt: skip
    command.add_argument(
        "snapshot", nargs="?", type=Path, metavar="SNAPSHOT",
        help="show this file instead of a system: the page's button Save or `tq live --save` has written it",
    )  # fmt: skip
    command.add_argument(
        "--save", type=Path, metavar="FILE",
        help="write what the page shows now into a file that you can send, without values of samples, and exit",
    )  # fmt: skip
    command.add_argument("--host", help="the address to listen on (default: live.host of the system, 127.0.0.1)")
    port = whole_number_type("a port from 0 to 65535", 0, 65535)
    command.add_argument("--port", type=port, help="the port (default: live.port of the system, 0: a free one)")
    command.add_argument(
        "--values", action="store_true", help="also show the first values and text of a sample that is opened"
    )
    add_tokenizer(command, "live.tokenizer of the system; needs --values")
    command.add_argument("--open", action="store_true", help="open the page in this machine's browser")
    add_name(command)
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C, or write a snapshot."""
    for one, others in WITHOUT.items():
        for other in others:
            if getattr(options, one) is not None and getattr(options, other):
                first = "--save" if one == "save" else f"the snapshot {options.snapshot}"
                options.parser.error(f"--{other} cannot be given with {first}: leave one of them out")
    if options.save is not None:
        return _save(find_system(options.name), options.save)
    try:
        from transfer_queue.live.serving.guard import new_token
        from transfer_queue.live.serving.live_server import LiveOptions
    except ImportError as error:
        raise StartError(
            f"the page cannot be served: {error}; install it with `pip install 'transfer_queue[live]'`"
        ) from None
    if options.snapshot is not None:
        from transfer_queue.live.snapshot import read_snapshot

        snapshot = read_snapshot(options.snapshot)
        chosen = LiveOptions("", new_token(), options.host or "127.0.0.1")
        return _serve(options, chosen, options.port or 0, f"the snapshot {options.snapshot}", snapshot)
    system = find_system(options.name)
    settings = _settings(system)
    values = options.values or settings.live_values
    if options.tokenizer is not None and not values:
        options.parser.error(f"--tokenizer is {options.tokenizer!r}, but values are hidden: give --values as well")
    chosen = LiveOptions(
        str(system.folder), new_token(), options.host or settings.live_host, values,
        (options.tokenizer or settings.live_tokenizer) if values else None, settings.live_insecure, settings.tls,
    )  # fmt: skip
    port = settings.live_port if options.port is None else options.port
    return _serve(options, chosen, port, f"the system {system.name}")


def _settings(system: RunningSystem) -> Settings:
    from transfer_queue.client.control_client import ControlClient

    with ControlClient(system) as client:
        return client.topology()[1]


def _serve(
    options: argparse.Namespace, chosen: LiveOptions, port: int, what: str, snapshot: LiveSnapshot | None = None
) -> int:
    from transfer_queue.live.serving.live_server import LiveServer, address_of
    from transfer_queue.net.server.sockets import bind_socket

    chosen.check()
    try:
        listener = bind_socket((chosen.host, port))
    except OSError as error:
        raise StartError(
            f"the page cannot be served on port {port} of {chosen.host}: {error}; choose another one with --port"
        ) from None
    with contextlib.closing(listener):
        try:
            server = LiveServer(chosen, listener, snapshot)
        except InvalidArgumentError as error:
            options.parser.error(str(error))  # the tokenizer cannot be used
        address = address_of(chosen, listener.getsockname()[1])
        print(f"{what} is shown at\n{address}\nPress Ctrl-C to end.", flush=True)
        if options.open:
            _open(address)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: server.stop())
        server.run()
    return 0


def _open(address: str) -> None:
    import webbrowser

    if not webbrowser.open(address):
        print("tq: no browser was found on this machine; open the address in another one", file=sys.stderr)


def _save(system: RunningSystem, path: Path) -> int:
    from transfer_queue.live.questions.questions import Questions
    from transfer_queue.live.reading.system_source import SystemSource
    from transfer_queue.live.snapshot import encode_snapshot, observe

    source = SystemSource(str(system.folder), values=False)
    with contextlib.closing(source), contextlib.closing(Questions(source, values=False)) as questions:
        data = encode_snapshot(observe(source, questions))
    path.write_bytes(data)
    print(f"the system {system.name} is saved in {path} ({len(data):,} bytes); `tq live {path}` shows it")
    return 0
