"""What metadata shows in a notebook and as text: bounded, harmless, and never an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import transfer_queue as tq
from html_checks import HOSTILE, BrokenRepr, check_html
from simulated import ragged, table
from transfer_queue.controller import DataPartitionStatus
from transfer_queue.metadata import BatchMeta, KVBatchMeta


def text_of(value: Any) -> str:
    return check_html(value._repr_html_()).text


class TestBatchMeta:
    def test_fields_have_types_shapes_and_sizes(self) -> None:
        meta = BatchMeta([4, 5], "train_0", custom_meta=[{"step": 1}, {}])
        meta.add_fields(table(x=torch.zeros(2, 3), y=ragged(2, 5), z=["a", "b"]))
        assert repr(meta) == "BatchMeta(size=2, partitions=['train_0'], fields=['x', 'y', 'z'], produced=2)"
        assert text_of(meta) == (
            "BatchMeta 2 samples of train_0all produced"
            "fieldtypeshape of a rowbytesxfloat32[3]24 Byfloat32[2..5]28 Bzobjects"
            "global indexproducedtag04yes{'step': 1}15yes{}"
        )

    def test_samples_of_several_partitions_name_theirs(self) -> None:
        meta = BatchMeta([4, 5], ["train_0", "val_0"], extra_info={"step": 1})
        assert text_of(meta) == (
            "BatchMeta 2 samples of train_0, val_00 of 2 producedextra_info: {'step': 1}"
            "global indexpartitionproducedtag04train_0no{}15val_0no{}"
        )

    def test_a_large_batch_is_bounded(self) -> None:
        names = [f"field_{n}" for n in range(500)]
        meta = BatchMeta(range(100_000), "p", {name: {"dtype": torch.int64, "shape": (3,)} for name in names})
        assert len(repr(meta)) < 300
        page = meta._repr_html_()
        assert len(page) < 20_000
        assert "… 488 more fields" in page
        assert "… 99,988 more samples" in page

    def test_what_is_not_known_is_no_error(self) -> None:
        assert text_of(BatchMeta()) == "BatchMeta 0 samples"
        assert "not known" in text_of(BatchMeta([1], "p", {"x": {}}))
        nested = BatchMeta([1], "p", {"x": {"is_nested": True, "dtype": torch.int64}})
        assert "rows differ" in text_of(nested)

    def test_tags_that_the_user_has_broken(self) -> None:
        meta = BatchMeta([1, 2, 3], "p")
        meta.custom_meta.clear()
        assert "3 samples" in text_of(meta)

    def test_showing_a_batch_does_not_change_it(self) -> None:
        meta = BatchMeta(range(100), "p", custom_meta=[{"step": n} for n in range(100)])
        meta._repr_html_()
        assert meta._tags.changed_entries() is None


class TestKVBatchMeta:
    def test_the_first_keys_are_shown(self) -> None:
        meta = KVBatchMeta([f"k{n}" for n in range(20)], [{"step": n} for n in range(20)], "train_0", ["x"])
        assert repr(meta) == (
            "KVBatchMeta(size=20, keys=['k0', 'k1', 'k2', 'k3', ... 16 more], partition_id='train_0', fields=['x'])"
        )
        text = text_of(meta)
        assert text.startswith("KVBatchMeta 20 keys of train_0fields: xkeytag0k0{'step': 0}1k1")
        assert text.endswith("11k11{'step': 11}… 8 more keys")

    def test_an_empty_one(self) -> None:
        assert repr(KVBatchMeta()) == "KVBatchMeta(size=0, keys=[], partition_id=None, fields=None)"
        assert text_of(KVBatchMeta()) == "KVBatchMeta 0 keysfields: not known"

    def test_values_whose_repr_fails(self) -> None:
        meta = KVBatchMeta(["a"], [{"x": BrokenRepr()}], "p", extra_info={"y": BrokenRepr(), "z": "z" * 10_000})
        assert len(repr(meta)) < 300
        assert "BrokenRepr instance at" in text_of(meta)


def snapshot(rows: int, name: str = "train_0", field: str = "x", task: str = "update") -> DataPartitionStatus:
    indexes = np.arange(rows)
    produced = np.stack([indexes % 2 == 0, indexes >= 0], axis=1).astype("i1")
    return DataPartitionStatus(
        name, indexes, [field, "y"], produced, {task: (indexes < 1).astype("i1")},
        [f"{field}{n}" if n else None for n in indexes], [{"step": int(n)} for n in indexes],
    )  # fmt: skip


def test_a_snapshot_shows_progress_and_samples() -> None:
    found = snapshot(2)
    assert repr(found) == "PartitionSnapshot('train_0', 2 samples, fields ['x', 'y'], tasks ['update'])"
    assert text_of(found) == (
        "PartitionSnapshot train_0, 2 samples, 2 fields, 1 task"
        "fieldproducedx1 / 2y2 / 2taskconsumedupdate1 / 2global indexkeytag0{'step': 0}1x1{'step': 1}"
    )
    assert text_of(snapshot(0)).startswith("PartitionSnapshot train_0, 0 samples")
    assert text_of(snapshot(100_000)).endswith("… 99,988 more samples")


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_names_are_text(evil: str) -> None:
    tags = [{evil: evil, "nested": {evil: [evil]}}]
    batch = BatchMeta([1], evil, {evil: {"dtype": evil and torch.int64}}, extra_info={evil: evil}, custom_meta=tags)
    keys = KVBatchMeta([evil], tags, evil, [evil], {evil: evil})
    for shown in (batch, keys, snapshot(3, evil, evil, evil)):
        check_html(shown._repr_html_())
        assert len(repr(shown)) < 500


def test_they_are_those_of_the_package() -> None:
    assert (tq.BatchMeta, tq.KVBatchMeta) == (BatchMeta, KVBatchMeta)
