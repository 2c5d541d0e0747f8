import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_queue.errors import ProtocolError
from transfer_queue.net.framing import HEADER, FrameReader, pack_frame

FRAMES = st.lists(st.tuples(st.binary(max_size=60), st.binary(max_size=200)), max_size=8)


def stream(frames: list[tuple[bytes, bytes]]) -> bytes:
    return b"".join(pack_frame(body, len(payload)) + payload for body, payload in frames)


def plain(frames: list[tuple[bytes, memoryview | None]]) -> list[tuple[bytes, bytes]]:
    return [(body, b"" if payload is None else bytes(payload)) for body, payload in frames]


@given(frames=FRAMES, data=st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(frames: list[tuple[bytes, bytes]], data: st.DataObject) -> None:
    rest = stream(frames)
    reader = FrameReader()
    read: list[tuple[bytes, bytes]] = []
    while rest:
        step = data.draw(st.integers(1, len(rest)))
        assert reader.missing > 0
        read += plain(reader.feed(rest[:step]))
        rest = rest[step:]
    assert read == frames
    assert reader.clean
    assert reader.missing == HEADER.size


@given(frames=FRAMES)
def test_missing_says_how_much_the_frame_under_way_lacks(frames: list[tuple[bytes, bytes]]) -> None:
    reader = FrameReader()
    for body, payload in frames:
        whole = pack_frame(body, len(payload)) + payload
        assert reader.feed(whole[: HEADER.size]) == [] or len(whole) == HEADER.size
        if len(whole) > HEADER.size:
            assert reader.missing == len(whole) - HEADER.size
            assert not reader.clean
            assert plain(reader.feed(whole[HEADER.size :])) == [(body, payload)]


def test_a_body_without_payload_has_none() -> None:
    assert FrameReader().feed(pack_frame(b"abc")) == [(b"abc", None)]


def test_payloads_outlive_later_feeds() -> None:
    reader = FrameReader()
    chunk = bytearray(pack_frame(b"a", 3) + b"xyz")
    ((_, first),) = reader.feed(chunk)
    chunk[:] = bytes(len(chunk))
    reader.feed(pack_frame(b"b", 1)[:7])
    assert bytes(first) == b"xyz"


@pytest.mark.parametrize(("body", "payload"), [(101, 0), (0, 1001), (0xFFFFFFFF, 0), (1, 1 << 63)])
def test_lengths_over_the_limit_are_refused_with_the_header(body: int, payload: int) -> None:
    reader = FrameReader(max_body=100, max_payload=1000)
    with pytest.raises(ProtocolError, match=rf"at most 100 bytes .* at most 1000 bytes, got {body} and {payload}\."):
        reader.feed(HEADER.pack(body, payload))


def test_an_announced_length_allocates_nothing() -> None:
    reader = FrameReader(max_payload=1 << 40)
    tracemalloc.start()
    try:
        reader.feed(HEADER.pack(10, 1 << 39) + b"0123456789")
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()
