"""Copies that several threads share, also if they fail, are interrupted, or get no core."""

import _thread
import threading
import weakref

import numpy as np
import pytest

from transfer_queue.wire.buffers import copies
from transfer_queue.wire.buffers.copies import PARALLEL, PER_THREAD, copy_bytes, run_in_parts, set_copy_threads

MANY = 8 * PER_THREAD
"""Bytes of which eight threads have enough."""


@pytest.fixture(params=[2, 4, 8])
def threads(request, monkeypatch):
    monkeypatch.setattr(copies, "_most", request.param)
    return request.param


def together(work, threads):
    """The same work, whose first parts are begun by all threads before any goes on."""
    all_of_them, begun = threading.Barrier(threads, timeout=60), iter(range(threads))

    def waiting(start, stop):
        if next(begun, None) is not None:
            all_of_them.wait()
        work(start, stop)

    return waiting


@pytest.mark.parametrize("ours", [True, False])
def test_a_failure_in_any_thread_is_raised(threads, ours):
    me = threading.get_ident()

    def work(start, stop):
        if (threading.get_ident() == me) == ours:
            raise KeyError(start)

    with pytest.raises(KeyError):
        run_in_parts(100, MANY, together(work, threads))


@pytest.mark.parametrize("nbytes", [MANY, 40 * MANY])
def test_all_threads_do_all_of_it_once(threads, nbytes):
    seen, who = [], set()

    def work(start, stop):
        seen.extend(range(start, stop))
        who.add(threading.get_ident())

    run_in_parts(nbytes, nbytes, together(lambda start, stop: work(start >> 10, stop >> 10), threads))
    assert sorted(seen) == list(range(nbytes >> 10))
    assert len(who) == threads


@pytest.mark.parametrize(("nbytes", "others"), [(PARALLEL - 1, 0), (PARALLEL, 1), (5 * PER_THREAD, 4), (1 << 30, 63)])
def test_each_thread_has_enough_to_copy(monkeypatch, nbytes, others):
    started = []
    monkeypatch.setattr(copies, "_most", 64)
    monkeypatch.setattr(_thread, "start_new_thread", lambda *arguments: started.append(arguments))
    run_in_parts(nbytes, nbytes, lambda start, stop: None)
    assert len(started) == others


def test_one_thread_is_the_callers(monkeypatch):
    monkeypatch.setattr(copies, "_most", copies._most)
    set_copy_threads(1)
    who = set()
    run_in_parts(100, 100 * PARALLEL, lambda start, stop: who.add((threading.get_ident(), start, stop)))
    assert who == {(threading.get_ident(), 0, 100)}


def test_threads_that_get_no_core_are_not_waited_for(threads, monkeypatch):
    begun = []
    monkeypatch.setattr(_thread, "start_new_thread", lambda function, arguments: begun.append((function, arguments)))
    data = np.random.default_rng(0).integers(0, 256, MANY, dtype=np.uint8)
    destination = np.empty_like(data)
    copy_bytes(destination, data)
    assert np.array_equal(destination, data)
    gone = weakref.ref(destination)
    del destination
    assert gone() is None  # though the threads may still come
    for function, arguments in begun:
        function(*arguments)


def test_what_starts_no_thread_is_done_by_the_caller(threads, monkeypatch):
    def refuse(function, arguments):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    data, destination = np.ones(MANY, np.uint8), np.zeros(MANY, np.uint8)
    copy_bytes(destination, data)
    assert destination.all()


def test_nothing_is_written_after_an_interruption(threads):
    me, done = threading.get_ident(), []

    def work(start, stop):
        if threading.get_ident() == me:
            raise KeyboardInterrupt
        done.append(start)

    with pytest.raises(KeyboardInterrupt):
        run_in_parts(100, MANY, together(work, threads))
    before = list(done)
    assert len(before) < 100
    run_in_parts(100, MANY, lambda start, stop: None)  # others come and go meanwhile
    assert done == before
