"""What travels between clients, controller and storage units: requests, replies, descriptors.

There is one module for each topic. It has the requests and their replies: `from transfer_queue.messages.claims import
Claim`. Every message is a `msgspec.Struct` that is encoded as a msgpack array; its tag is the name of its class, unless
the class was renamed. Columns of numbers travel as the bytes of little-endian numpy arrays (`i8`, `i4`, `u8`), so that
a batch costs a few buffers, not an object for each row. Records, which only the core writes and replays, are in
`core/events/records.py`.

Nothing here depends on sockets, files, torch or clocks. Durations are in seconds.
"""
