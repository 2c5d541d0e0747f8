"""BatchMeta and KVBatchMeta against plain models: lists of rows, and lists of keys with tags."""

import copy
import pickle
import subprocess
import sys
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from transfer_queue.client.conversion.replies import batch_meta
from transfer_queue.errors import DuplicateError, InvalidArgumentError, OutOfRangeError, UnknownKeyError
from transfer_queue.messages.claims import ClaimReply
from transfer_queue.messages.descriptors import FieldType
from transfer_queue.metadata import BatchMeta, KVBatchMeta
from transfer_queue.metadata.batch_columns import TagColumn

# these tests share cores with others: slow is no failure
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PARTITIONS = ("p", "q", "r")
tag_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.integers())
tags = st.dictionaries(st.sampled_from("abc"), tag_values, max_size=2)
rows = st.fixed_dictionaries(
    {
        "index": st.integers(0, 2**62),
        "partition": st.sampled_from(PARTITIONS),
        "status": st.integers(0, 1),
        "tag": tags,
        "edit": tags,
        "shape": st.tuples(st.integers(0, 3)) | st.tuples(st.integers(0, 3), st.integers(0, 3)),
    }
)


def batch_of(model):
    """The BatchMeta that a list of rows means: one ragged field, one dense field, one of objects, edited tags."""
    meta = BatchMeta(
        [row["index"] for row in model],
        [row["partition"] for row in model],
        {
            "ragged": {
                "dtype": torch.int64,
                "shape": None,
                "is_nested": True,
                "is_non_tensor": False,
                "per_sample_shapes": [torch.Size(row["shape"]) for row in model],
            },
            "dense": {"dtype": torch.float32, "shape": torch.Size([3]), "is_nested": False, "is_non_tensor": False},
            "objects": {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True, "origin": "test"},
        },
        [row["status"] for row in model],
        {"step": 3},
        [row["tag"] for row in model],
    )
    if any(row["edit"] for row in model):
        for tag, row in zip(meta.custom_meta, model, strict=True):
            tag.update(row["edit"])
    return meta


def same(one, other):
    """Equality in which NaN equals NaN."""
    return repr(one) == repr(other)


def assert_is(meta, model):
    """The batch is what the list of rows says, in every way it can be read."""
    assert meta.size == len(meta) == len(model)
    assert meta.global_indexes == meta.copy().global_indexes == [row["index"] for row in model]
    assert meta.partition_ids == [row["partition"] for row in model]
    assert meta.production_status.tolist() == [row["status"] for row in model]
    assert meta.is_ready == (bool(model) and all(row["status"] for row in model))
    assert same(
        [sorted(tag.items()) for tag in meta.get_all_custom_meta()],
        [sorted({**row["tag"], **row["edit"]}.items()) for row in model],
    )
    assert meta.get_shapes("ragged") == [torch.Size(row["shape"]) for row in model]
    assert meta.get_shapes("dense") == [torch.Size([3])] * len(model)
    assert meta.get_dtypes("objects") == [None] * len(model)
    schema = meta.field_schema
    assert schema["ragged"]["is_nested"]
    assert schema["ragged"]["per_sample_shapes"] == meta.get_shapes("ragged")
    assert schema["objects"]["origin"] == "test"
    changed = meta._changed_tags() or [None] * len(model)
    expected = [
        {key: value for key, value in row["edit"].items() if not same([row["tag"].get(key, ...)], [value])} or None
        for row in model
    ]
    assert same(
        [entry and sorted(entry.items()) for entry in changed], [entry and sorted(entry.items()) for entry in expected]
    )


def assert_owned(meta):
    """Writing what the batch hands out works."""
    meta.production_status[:] = 0
    for tag in meta.custom_meta:
        tag["written"] = True
    meta.extra_info["written"] = True


class TestAgainstRows:
    @patient
    @given(st.lists(rows, max_size=6))
    def test_reading(self, model):
        meta = batch_of(model)
        assert_is(meta, model)
        for sample, row in zip(meta.samples, model, strict=True):
            assert (sample.global_index, sample.partition_id) == (row["index"], row["partition"])
            assert sample.production_status == row["status"]
            assert same(sorted(sample.custom_meta.items()), sorted({**row["tag"], **row["edit"]}.items()))
            assert sample.fields["ragged"]["shape"] == torch.Size(row["shape"])
            assert list(sample.fields) == ["dense", "objects", "ragged"]

    @patient
    @given(st.lists(rows, max_size=6), st.data())
    def test_cuts(self, model, data):
        meta = batch_of(model)
        positions = data.draw(st.lists(st.integers(0, len(model) - 1), max_size=8)) if model else []
        bounds = slice(*data.draw(st.tuples(*[st.none() | st.integers(-7, 7)] * 2, st.sampled_from([None, 1, 2, -1]))))
        cuts = [
            (meta.select_samples(positions), [model[position] for position in positions]),
            (meta.select_samples(np.array(positions, dtype=np.int32)), [model[position] for position in positions]),
            (meta.select_samples(torch.tensor(positions, dtype=torch.int64)), [model[p] for p in positions]),
            (meta[bounds], model[bounds]),
            (meta.copy(), model),
            (copy.copy(meta), model),
            (copy.deepcopy(meta), model),
            (meta.select_fields(["ragged", "dense", "objects", "unknown"]), model),
            *((one, [row]) for one, row in zip(meta, model, strict=True)),
            *((meta[i - len(model)], [row]) for i, row in enumerate(model)),
        ]
        for cut, expected in cuts:
            assert_is(cut, expected)
            assert_owned(cut)
        assert_is(meta, model)
        assert "written" not in meta.extra_info

    @patient
    @given(st.lists(rows, max_size=9), st.integers(1, 12))
    def test_chunk_and_concat_are_inverse(self, model, chunks):
        meta = batch_of(model)
        parts = meta.chunk(chunks)
        sizes = [part.size for part in parts]
        assert len(parts) == chunks
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        whole = BatchMeta.concat(parts)
        assert_is(whole, model)
        assert whole.field_schema == meta.field_schema
        assert whole.extra_info == {"step": 3}
        assert_owned(whole)
        for part in parts:
            assert "written" not in part.extra_info
        assert_is(meta, model)

    @patient
    @given(st.lists(st.lists(rows, max_size=4), max_size=4))
    def test_concat(self, models):
        assert BatchMeta.concat(batch_of(model) for model in models).size == sum(map(len, models))
        if any(models):
            assert_is(BatchMeta.concat(batch_of(model) for model in models), list(chain.from_iterable(models)))

    @patient
    @given(st.lists(rows, max_size=9))
    def test_by_partition(self, model):
        meta = batch_of(model)
        names = list(dict.fromkeys(row["partition"] for row in model))
        parts = meta.chunk_by_partition()
        assert len(parts) == len(names)
        for name, part in zip(names, parts, strict=True):
            assert_is(part, [row for row in model if row["partition"] == name])
            assert part._partition() == name

    @patient
    @given(st.lists(rows, max_size=6), st.randoms())
    def test_reorder(self, model, random):
        meta = batch_of(model)
        held, status = meta.custom_meta, meta.production_status
        order = list(range(len(model)))
        random.shuffle(order)
        meta.reorder(order)
        assert_is(meta, [model[position] for position in order])
        assert meta.custom_meta is held
        assert meta.production_status is status

    @patient
    @given(st.lists(rows, max_size=6), st.sampled_from([2, 4, 5]))
    def test_pickling(self, model, protocol):
        meta = batch_of(model)
        meta.global_indexes, meta.field_schema
        twin = pickle.loads(pickle.dumps(meta, protocol))
        assert_is(twin, model)
        assert twin.field_schema == meta.field_schema
        assert twin.extra_info == meta.extra_info
        assert_owned(twin)

    @patient
    @given(st.lists(rows, min_size=1, max_size=6), st.data())
    def test_union(self, model, data):
        other = [{**row, "tag": data.draw(tags), "edit": {}, "status": data.draw(st.integers(0, 1))} for row in model]
        for row in model:
            row["edit"] = {}
        both = batch_of(model).union(batch_of(other).select_fields("dense"))
        merged = [
            {**mine, "tag": {**mine["tag"], **theirs["tag"]}, "status": mine["status"] & theirs["status"]}
            for mine, theirs in zip(model, other, strict=True)
        ]
        assert_is(both, merged)

    @patient
    @given(st.lists(rows, max_size=6))
    def test_schema_is_what_the_constructor_takes(self, model):
        meta = batch_of(model)
        twin = BatchMeta(meta.global_indexes, meta.partition_ids, meta.field_schema)
        assert twin.field_schema == meta.field_schema


class TestBatchMeta:
    def test_out_of_band_buffers(self):
        buffers = []
        whole = pickle.dumps(BatchMeta([1, 2], ["p", "p"]), protocol=5, buffer_callback=buffers.append)
        meta = pickle.loads(whole, buffers=[bytes(buffer) for buffer in buffers])
        meta.production_status[0] = 1
        assert meta.production_status.tolist() == [1, 0]

    def test_pickles_carry_no_caches_and_few_bytes(self):
        shapes = np.random.default_rng(0).integers(1, 4096, (10_000, 1)).tolist()
        schema = {"x": {"dtype": torch.int64, "per_sample_shapes": shapes}}
        meta = BatchMeta(range(10_000), "p", schema)
        fresh = len(pickle.dumps(meta))
        meta.global_indexes, meta.partition_ids, meta.field_schema, meta.custom_meta, meta.get_shapes("x")
        assert len(pickle.dumps(meta)) == fresh < 6 * 10_000

    def test_tags_that_were_only_read_travel_once(self):
        meta = BatchMeta(range(100), ["p"] * 100, custom_meta=[{"n": str(i) * 50} for i in range(100)])
        fresh = len(pickle.dumps(meta))
        [dict(sample.custom_meta) for sample in meta.samples]
        meta.custom_meta
        assert len(pickle.dumps(meta)) == fresh
        meta.custom_meta[7]["n"] = "x" * 50
        assert fresh < len(pickle.dumps(meta)) < fresh + 200

    def test_what_is_handed_out_is_the_callers_own(self):
        meta = BatchMeta([3, 1], ["p", "p"], {"a": {"dtype": torch.int64, "shape": torch.Size([2])}})
        meta.global_indexes.sort()
        meta.partition_ids.clear()
        meta.field_schema["a"]["dtype"] = None
        meta.get_all_custom_meta()[0]["n"] = 1
        meta.get_all_extra_info()["n"] = 1
        assert meta.global_indexes == [3, 1]
        assert meta.partition_ids == ["p", "p"]
        assert meta.get_dtypes("a") == [torch.int64] * 2
        assert meta.custom_meta == [{}, {}]
        assert meta.extra_info == {}

    def test_what_is_given_is_copied_in(self):
        status, tag, extra = np.ones(1, dtype=np.int8), {"n": [1]}, {"a": 1}
        meta = BatchMeta([1], ["p"], None, status, extra, [tag])
        status[0] = 0
        tag["n"].append(2)
        extra["b"] = 2
        assert meta.is_ready
        assert meta.custom_meta == [{"n": [1]}]
        assert meta.extra_info == {"a": 1}

    def test_one_partition_for_all(self):
        assert BatchMeta([1, 2], "train").partition_ids == ["train", "train"]

    def test_nothing_is_produced_by_default(self):
        assert BatchMeta([1, 2], "p").production_status.tolist() == [0, 0]

    def test_production_status_is_assignable(self):
        meta = BatchMeta([1, 2], "p")
        meta.production_status = [1, 0]
        assert meta.production_status.tolist() == [1, 0]
        assert meta.production_status.dtype == np.int8
        with pytest.raises(InvalidArgumentError, match="each of the 2 samples"):
            meta.production_status = [1]

    @pytest.mark.parametrize("indexes", [[1.5], [[1]], [True], ["a"]])
    def test_indexes_must_be_whole_numbers(self, indexes):
        with pytest.raises(InvalidArgumentError, match="global_indexes"):
            BatchMeta(indexes, ["p"])

    def test_lengths_must_match(self):
        shapes = {"per_sample_shapes": [torch.Size([1])]}
        for arguments, name in (
            (([1, 2], ["p"]), "partition_ids"),
            (([1], ["p"], {"a": {**shapes, "per_sample_shapes": []}}), "per_sample_shapes"),
            (([1], ["p"], None, [[1]]), "production_status"),
            (([1], ["p"], None, ["ready"]), "production_status"),
            (([1], ["p"], None, None, None, [{}, {}]), "custom_meta"),
        ):
            with pytest.raises(InvalidArgumentError, match=name):
                BatchMeta(*arguments)

    @pytest.mark.parametrize("entry", [3, {"shape": 5}, {"per_sample_shapes": [("x",)]}])
    def test_schema_must_make_sense(self, entry):
        with pytest.raises(InvalidArgumentError, match="'a'"):
            BatchMeta([1], ["p"], {"a": entry})

    def test_shapes_that_agree_make_no_nested_field(self):
        entry = {"dtype": torch.int64, "per_sample_shapes": [[2], [2]]}
        assert BatchMeta([1, 2], "p", {"a": entry}).field_schema["a"]["shape"] == torch.Size([2])
        entry["per_sample_shapes"] = [[2], [3]]
        assert BatchMeta([1, 2], "p", {"a": entry}).field_schema["a"]["is_nested"] is True

    def test_positions(self):
        meta = BatchMeta([1, 2, 3], "p")
        for positions in ([-1], [3], [0, 5]):
            with pytest.raises(OutOfRangeError):
                meta.select_samples(positions)
        with pytest.raises(OutOfRangeError):
            meta[3]
        with pytest.raises(InvalidArgumentError):
            meta.select_samples([True, False, True])
        with pytest.raises(TypeError):
            meta["a"]
        assert meta[np.int64(1)].global_indexes == [2]

    def test_reorder_refuses(self):
        meta = BatchMeta([1, 2, 3], "p")
        for order, error in (
            ([0, 0, 1], DuplicateError),
            ([0, 1, 3], OutOfRangeError),
            ([0, 1, -1], OutOfRangeError),
            ([0, 1], InvalidArgumentError),
        ):
            with pytest.raises(error):
                meta.reorder(order)
        assert meta.global_indexes == [1, 2, 3]

    @pytest.mark.parametrize("chunks", [0, -1, 1.5, True])
    def test_chunks_must_be_counted(self, chunks):
        for meta in (BatchMeta([1], "p"), KVBatchMeta(["a"], [{}])):
            with pytest.raises(InvalidArgumentError, match="positive integer"):
                meta.chunk(chunks)

    def test_unvalidated_concat_takes_what_is_shared(self):
        one = BatchMeta([1], "p", {"a": {"dtype": torch.int64}, "b": {}}, extra_info={"e": 1})
        two = BatchMeta([2], "p", {"a": {"dtype": torch.int32}}, extra_info={"e": 2})
        whole = BatchMeta.concat([one, two], validate=False)
        assert whole.field_names == ["a"]
        assert whole.extra_info == {"e": 2}
        with pytest.raises(InvalidArgumentError, match="Field names do not match"):
            BatchMeta.concat([two, one])

    def test_concat_of_objects_and_numbers(self):
        one = BatchMeta([1], "p", {"a": {"is_non_tensor": True}})
        two = BatchMeta([2], "p", {"a": {"dtype": torch.int32}})
        with pytest.raises(InvalidArgumentError, match="objects in one batch"):
            BatchMeta.concat([one, two])

    def test_concat_of_rows_that_differ_is_nested(self):
        parts = [
            BatchMeta([i], "p", {"a": {"dtype": torch.int64, "shape": shape}})
            for i, shape in enumerate([(2,), (2,), (3,), (1, 1)])
        ]
        assert BatchMeta.concat(parts[:2]).field_schema["a"]["shape"] == torch.Size([2])
        assert BatchMeta.concat(parts[:3]).get_shapes("a") == [(2,), (2,), (3,)]
        assert BatchMeta.concat(parts).get_shapes("a") == [(2,), (2,), (3,), (1, 1)]
        assert BatchMeta.concat(parts).field_schema["a"]["is_nested"] is True

    def test_concat_with_unknown_shapes(self):
        parts = [
            BatchMeta([i], "p", {"a": {"dtype": torch.int64, "shape": shape}}) for i, shape in enumerate([(2,), None])
        ]
        assert BatchMeta.concat(parts).get_shapes("a") == [None, None]

    def test_subclasses_stay_themselves(self):
        class Mine(BatchMeta):
            pass

        assert type(Mine([1], "p")[0]) is type(Mine.empty()) is type(Mine.concat([Mine([1], "p")])) is Mine


class TestOfAReply:
    def test_rows_are_not_copied(self):
        rows = np.arange(2)
        assert BatchMeta._from_columns(rows, "p", [])._rows() is rows

    def test_fields_of_unknown_shape(self):
        field = FieldType("z", "tensor", "int64", 1, None, 1, False)
        schema = batch_meta("p", ClaimReply(np.arange(2).tobytes(), [field]), False).field_schema
        assert schema["z"]["is_nested"] is True
        assert BatchMeta([1], "p", {"never": {}}).field_schema["never"]["is_nested"] is False


class TestChangedTags:
    """The entries that a put sends: those that are new, or differ from what the system has."""

    def column(self):
        return TagColumn.from_tags([{"n": 1, "deep": {"l": [1]}}, {}, {"x": "y"}], 3)

    def test_edits_in_place(self):
        column = self.column()
        column.editable_tags()[0]["deep"]["l"].append(2)
        column.editable_tags()[1]["new"] = None
        assert column.changed_entries() == [{"deep": {"l": [1, 2]}}, {"new": None}, None]

    def test_reading_changes_nothing(self):
        column = self.column()
        assert column.editable_tags()[0]["n"] == 1
        assert column.to_list() == column.first(3)
        assert column.changed_entries() is None

    def test_updates(self):
        column = self.column()
        column.update([{"n": 1}, {}, {"x": "z"}])
        assert column.changed_entries() == [None, None, {"x": "z"}]

    def test_removals_are_not_told(self):
        column = self.column()
        del column.editable_tags()[0]["n"]
        column.clear()
        assert column.editable_tags() == [{}, {}, {}]
        assert column.changed_entries() is None

    def test_another_type_is_a_change(self):
        column = self.column()
        column.editable_tags()[0]["n"] = True
        assert column.changed_entries()[0] == {"n": True}

    @pytest.mark.parametrize(
        "value", [np.arange(3), torch.arange(3), torch.tensor([float("nan")]), float("nan"), np.array([None, "a"])]
    )
    def test_values_whose_equality_is_no_truth(self, value):
        column = TagColumn.from_tags([{"v": value}], 1)
        column.editable_tags()[0]["v"]
        assert column.changed_entries() is None
        column.editable_tags()[0]["w"] = value
        assert list(column.changed_entries()[0]) == ["w"]

    @pytest.mark.parametrize("value", [np.zeros(3), torch.zeros(3)])
    def test_arrays_edited_in_place(self, value):
        column = TagColumn.from_tags([{"v": value}], 1)
        column.editable_tags()[0]["v"][1] = 5
        assert list(column.changed_entries()[0]) == ["v"]

    def test_saved(self):
        column = self.column()
        column.editable_tags()[1]["m"] = [1]
        column.mark_saved()
        assert column.changed_entries() is None
        column.editable_tags()[1]["m"].append(2)
        assert column.changed_entries() == [None, {"m": [1, 2]}, None]

    def test_assignment(self):
        column = self.column()
        column.replace([{"n": 1}, {"a": 1}, {}])
        assert column.changed_entries() == [None, {"a": 1}, None]

    def test_a_cut_is_saved_apart(self):
        column = self.column()
        column.editable_tags()[1]["m"] = 1
        part = column.take(slice(1, None))
        part.mark_saved()
        assert part.changed_entries() is None
        assert column.changed_entries() == [None, {"m": 1}, None]

    def test_union_keeps_what_each_side_has_changed(self):
        one, other = self.column(), self.column()
        one.editable_tags()[0]["n"] = 2
        other.editable_tags()[1]["m"] = 1
        # the other side's entries win, so what it has not changed undoes this side's change
        assert one.merge(other).changed_entries() == [None, {"m": 1}, None]

    @pytest.mark.parametrize("spoil", [lambda tags: tags.pop(), lambda tags: tags.__setitem__(0, None)])
    def test_a_spoiled_list_is_told(self, spoil):
        column = self.column()
        spoil(column.editable_tags())
        for use in (
            column.changed_entries,
            lambda: column.take(slice(None)),
            column.to_list,
            lambda: pickle.dumps(column),
            lambda: column.update([{}] * 3),
        ):
            with pytest.raises(InvalidArgumentError, match="one dict for each"):
                use()

    @pytest.mark.parametrize("tags", [[{}], [{}, {}, 3]])
    def test_updates_must_fit(self, tags):
        column = self.column()
        with pytest.raises(InvalidArgumentError, match="one dict for each"):
            column.update(tags)
        assert column.changed_entries() is None


keys = st.lists(st.text(max_size=3), unique=True, max_size=7)


def keyed(names, **more):
    return KVBatchMeta(names, [{"of": name} for name in names], "p", ["x", "y"], {"e": [1]}, **more)


class TestKVBatchMeta:
    @patient
    @given(keys, st.integers(1, 9))
    def test_chunk_and_concat_are_inverse(self, names, chunks):
        meta = keyed(names)
        parts = meta.chunk(chunks)
        sizes = [part.size for part in parts]
        assert len(parts) == chunks
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1
        assert KVBatchMeta.concat(parts) == meta

    @patient
    @given(keys, st.randoms())
    def test_select_and_reorder(self, names, random):
        meta = keyed(names)
        order = list(range(len(names)))
        random.shuffle(order)
        moved = meta.select_keys([names[position] for position in order])
        assert moved == keyed([names[position] for position in order])
        meta.reorder(order)
        assert meta == moved
        assert meta.select_keys(names[:2]) == keyed(names[:2])

    @patient
    @given(keys)
    def test_pickling(self, names):
        meta = keyed(names)
        if names:
            meta.select_keys(names[0])
        twin = pickle.loads(pickle.dumps(meta))
        assert twin == meta == copy.deepcopy(meta)
        assert twin.select_keys(names) == meta

    def test_cuts_are_owned(self):
        meta = keyed(["a", "b"])
        for cut in (
            meta.select_keys("a"),
            meta.chunk(2)[0],
            KVBatchMeta.concat([meta]),
            KVBatchMeta._make(*[[]] * 2, "p", []),
        ):
            for tag in cut.tags:
                tag["of"] = "changed"
            cut.extra_info.setdefault("e", []).append(2)
            cut.fields.append("z")
        assert meta == keyed(["a", "b"])

    def test_equality(self):
        meta = keyed(["a"])
        for other in (keyed(["b"]), KVBatchMeta(["a"], [{"of": "a"}], "p", ["x", "y"]), 3):
            assert meta != other
        meta.extra_info = {"t": torch.tensor([1.0, float("nan")]), "a": np.arange(2)}
        assert meta == pickle.loads(pickle.dumps(meta))
        with pytest.raises(TypeError):
            hash(meta)

    def test_keys_may_be_edited_in_place(self):
        meta = keyed(["a", "b"])
        assert meta.select_keys("b").keys == ["b"]
        meta.keys[1] = "c"
        assert meta.select_keys("c").tags == [{"of": "b"}]
        with pytest.raises(UnknownKeyError, match="not found in current batch"):
            meta.select_keys("b")

    def test_one_str_is_one_name(self):
        meta = KVBatchMeta("key", [{}], fields="field")
        assert meta.keys == ["key"]
        assert meta.fields == ["field"]

    def test_assignments_are_checked_and_copied(self):
        meta, tag, info = keyed(["a"]), {"l": []}, {"l": []}
        meta.tags, meta.extra_info = [tag], info
        tag["l"].append(1)
        info["l"].append(1)
        assert meta.tags == [{"l": []}]
        assert meta.extra_info == {"l": []}
        with pytest.raises(InvalidArgumentError, match="keys and tags must have same length"):
            meta.tags = []
        with pytest.raises(InvalidArgumentError, match="tags must have one dict"):
            meta.tags = [3]
        with pytest.raises(DuplicateError, match="Got duplicated fields"):
            meta.fields = ["x", "x"]
        assert meta.fields == ["x", "y"]
        assert meta.size == 1

    def test_refusals(self):
        for build, error, words in (
            (lambda: KVBatchMeta(["a", "a"], [{}, {}]), DuplicateError, "Got duplicated keys"),
            (lambda: KVBatchMeta(["a"]), InvalidArgumentError, "same length"),
            (lambda: keyed(["a"]).select_keys(["a", "a"]), DuplicateError, "Contain duplicate keys"),
            (lambda: keyed(["a", "b"]).reorder([1, 1]), DuplicateError, "Contain duplicate indexes"),
            (lambda: keyed(["a", "b"]).reorder([1]), InvalidArgumentError, "does not match"),
            (lambda: keyed(["a", "b"]).reorder([0, 2]), OutOfRangeError, "out of range"),
            (lambda: keyed(["a", "b"]).reorder([0, -1]), OutOfRangeError, "out of range"),
            (lambda: KVBatchMeta.concat([keyed(["a"]), keyed(["a"])]), DuplicateError, "Got duplicated keys"),
        ):
            with pytest.raises(error, match=words):
                build()

    def test_concat_of_known_and_unknown_fields(self):
        with pytest.raises(InvalidArgumentError, match="Field names do not match"):
            KVBatchMeta.concat([keyed(["a"]), KVBatchMeta(["b"], [{}], "p")])

    def test_select_finds_keys_once(self):
        """Selecting from the same batch again costs what is selected, not what is held."""
        looked = Counter()

        class Watched(str):
            def __hash__(self):
                looked["hashes"] += 1
                return super().__hash__()

        meta = KVBatchMeta([Watched(i) for i in range(100)], [{}] * 100)
        meta.select_keys(["7"])
        looked.clear()
        meta.select_keys(["8"])
        assert looked["hashes"] == 0


def test_imports_nothing_above():
    """The module can be used without client, storage or network."""
    code = (
        "import sys, transfer_queue.metadata\n"
        "print(sorted(n.split('.')[1] for n in sys.modules if n.startswith('transfer_queue.')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(eval(found)) == {"display", "errors", "metadata"}


@pytest.mark.parametrize("empty", [BatchMeta([], []), BatchMeta(), BatchMeta.empty(), BatchMeta([1], ["p"])[:0]])
def test_an_empty_answer_is_not_ready(empty):
    assert not empty.is_ready
