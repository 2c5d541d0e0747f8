"""The tests of CPython for `queue.Queue`, run on `tq.Queue`."""

from __future__ import annotations

import queue
import unittest

import pytest

import transfer_queue as tq

standard = pytest.importorskip("test.test_queue", reason="this interpreter does not contain its own tests")


class TestQueueOfTheStandardLibrary(standard.BaseQueueTestMixin, unittest.TestCase):
    """`type2test` and `queue` are what the tests of CPython read."""

    type2test = tq.Queue
    queue = queue

    @classmethod
    def setUpClass(cls) -> None:
        tq.init()

    @classmethod
    def tearDownClass(cls) -> None:
        tq.close()
