"""The single ranks of bands that a viewer has opened: `LaneBook` joins them, and a `BandBook` keeps some of them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from transfer_queue.live.answers import LanesAnswer
from transfer_queue.live.view.lane_book import Key, LaneBook, worker_key
from transfer_queue.timeline.account import Account

MAX_OPENED_LANES = 64
MAX_BOOKS = 8  # as many as there may be viewers
EPOCH = re.compile(r"(\d{1,18})-(\d{1,18}(?:\.\d{1,4})?)")


class BandBook(LaneBook):
    """The lanes of some ranks of a band."""

    def __init__(self, start: float) -> None:
        super().__init__(start)
        self.number = 0
        """A new number whenever the lanes change, so that a viewer needs all of them."""
        self.chosen: Sequence[Key] = ()
        """The ranks."""

    def _group(self, account: Account, now: float) -> dict[Key, list[int]]:
        places = {worker_key(account, worker): worker for worker in range(len(account.table.workers))}
        return {key: [places[key]] for key in self.chosen if key in places}


class OpenedBands:
    """Answers `GET /api/lanes`. Viewers who have opened the same ranks share one book.

    Args:
        start: When the recording begins, in Unix seconds, as for the `LaneBook` that joins the ranks.
    """

    def __init__(self, start: float) -> None:
        self._start = start
        self._books: dict[tuple[str, int, int], BandBook] = {}
        self._numbers = 0

    def answer(
        self, joined: Sequence[Key], account: Account, task: str, first: int, count: int, after: str
    ) -> LanesAnswer:
        """Return lanes of a band.

        Args:
            joined: The ranks of the band.
            account: What has happened.
            task: The task of the band.
            first: The position of the first rank in the band. Beyond the end, it is that of the last page.
            count: The number of ranks, which is reduced to 64.
            after: The `epoch` of the previous answer, to get what is new since then; "" to get everything.
        """
        count = max(1, min(count, MAX_OPENED_LANES))
        if first >= len(joined):
            first = max(len(joined) - 1, 0) // count * count
        key = task, first, count
        book = self._books.pop(key, None) or BandBook(self._start)
        self._books[key] = book  # the most recent one is last
        while len(self._books) > MAX_BOOKS:
            del self._books[next(iter(self._books))]
        book.chosen = joined[first : first + count]
        until = book.update(account).until
        if book.renewed or not book.number:
            self._numbers += 1
            book.number = self._numbers
        timeline = book.timeline(account, _since(after, book.number, until))
        return LanesAnswer(task, f"{book.number}-{until}", first, len(joined), timeline)


def _since(after: str, number: int, until: float) -> float:
    """Return from which time on a viewer needs the lanes: from the beginning if it does not have this book."""
    match = EPOCH.fullmatch(after)
    if match is None or int(match[1]) != number or float(match[2]) > until:
        return 0.0
    return float(match[2])
