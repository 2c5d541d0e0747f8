"""How a conf is merged over the defaults, unknown keys, keys of the PyPI package, and differences from a system."""

from __future__ import annotations

import importlib.resources
import pickle

import pytest
from omegaconf import DictConfig, OmegaConf

from transfer_queue.config.loading import ALIASES, WITHOUT_COUNTERPART, as_json, differences, merge, unknown_keys
from transfer_queue.config.settings import Settings
from transfer_queue.errors import InvalidArgumentError
from transfer_queue.sampler import RankAwareSampler


def holding(sampler: object) -> DictConfig:
    """Return a conf that contains an object."""
    return OmegaConf.create({"controller": {"sampler": sampler}}, flags={"allow_objects": True})


def nested(path: str, value: object) -> dict:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


class TestMerge:
    def test_an_empty_conf_results_in_the_defaults(self):
        """merge(None) and merge({}) return the defaults of the resource."""
        text = (importlib.resources.files("transfer_queue") / "config.yaml").read_text("utf-8")
        assert merge() == merge({}) == OmegaConf.create(text)

    def test_over_the_defaults(self):
        """A value of the conf replaces the default of its key."""
        merged = merge({"controller": {"polling_mode": True}})
        assert (merged.controller.polling_mode, merged.controller.sampler) == (True, "SequentialSampler")

    def test_unknown_keys(self):
        """Unknown keys are kept, at every depth."""
        merged = merge({"mine": {"a": 1}, "controller": {"also": [1, 2]}})
        assert (merged.mine.a, list(merged.controller.also)) == (1, [1, 2])

    @pytest.mark.parametrize("flag", ["struct", "readonly"])
    def test_flags(self, flag):
        """Struct-mode and read-only nodes are accepted; the result is neither."""
        conf = OmegaConf.create({"controller": {"polling_mode": True, "mine": 1}, "new": 2}, flags={flag: True})
        merged = merge(conf)
        merged.another = 3
        merged.controller.another = 4
        assert (merged.new, merged.another, merged.controller.mine, merged.controller.another) == (2, 3, 1, 4)

    def test_caller_keeps_its_conf(self):
        """The caller's conf is never changed, nor shared with the result."""
        given = {"controller": {"polling_mode": True}}
        conf = OmegaConf.create(given)
        merge(given).controller.polling_mode = False
        merge(conf).controller.polling_mode = False
        assert given == conf == {"controller": {"polling_mode": True}}

    def test_objects(self):
        """Objects are kept in a dict, and in a conf that allows objects."""
        sampler = RankAwareSampler()
        assert merge(holding(sampler)).controller.sampler is sampler
        assert merge({"controller": {"sampler": RankAwareSampler}}).controller.sampler is RankAwareSampler

    def test_interpolation_to_the_outside(self):
        """A node of a larger conf is resolved with the values that it refers to there."""
        whole = OmegaConf.create({"polling": True, "queue": {"controller": {"polling_mode": "${polling}"}}})
        assert merge(whole.queue).controller.polling_mode is True

    def test_interpolation_to_a_default(self):
        """An interpolation may refer to a default."""
        assert merge({"mine": "${backend.storage_backend}"}).mine == "SimpleStorage"

    def test_missing_value(self):
        """A value that is still missing ("???") leaves the default."""
        assert merge({"controller": {"sampler": "???"}}).controller.sampler == "SequentialSampler"

    def test_merging_twice(self):
        """Merging a merged conf again does not change it."""
        once = merge({"mine": 1, "metrics": {"port": 9000}})
        assert merge(once) == once

    def test_pickles(self):
        """A merged conf can be pickled."""
        merged = merge({"mine": 1})
        assert pickle.loads(pickle.dumps(merged)) == merged

    @pytest.mark.parametrize("conf", [5, "text", ["controller"]])
    def test_no_mapping(self, conf):
        """A conf must be a mapping."""
        with pytest.raises(InvalidArgumentError, match="conf is"):
            merge(conf)


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("path", "meant"),
        [
            ("controller.samplr", "controller.sampler"),
            ("controler", "controller"),
            ("polling_mode", "controller.polling_mode"),
            ("system_name", "system.name"),
            ("backend.num_data_storage_units", "backend.SimpleStorage.num_data_storage_units"),
            ("backend.SimpleStorage.offload.high_watermrk", "backend.SimpleStorage.offload.high_watermark"),
            ("metrics.prt", "metrics.port"),
        ],
    )
    def test_an_unknown_key_is_named_with_the_nearest_known_one(self, path, meant):
        assert unknown_keys(nested(path, 1)) == [f"{path}: unknown; did you mean {meant}?"]

    def test_a_key_that_resembles_none_is_named_alone_and_kept(self):
        assert unknown_keys({"wandb": {"a": 1, "b": {"c": 2}}}) == ["wandb: unknown"]
        assert merge({"wandb": {"a": 1}}).wandb.a == 1

    def test_every_documented_key_is_known(self):
        assert unknown_keys(None) == unknown_keys({}) == unknown_keys(merge()) == []

    def test_the_result_of_init_can_be_passed_to_it_again(self):
        assert unknown_keys(merge({"system": {"folder": "/tmp/x"}})) == []

    @pytest.mark.parametrize(
        "conf",
        [
            {"ray": {"actor_options": {"num_gpus": 1}}},
            {"backend": {"options": {"anything": {"goes": 1}}}},
            {"controller": {"sampler_args": {"token_budget": 5}}},
            {"security": {"tls": {"certificate": "/a", "private_key": "/b", "authority": "/c"}}},
        ],
    )
    def test_any_key_of_a_section_whose_keys_users_choose_is_known(self, conf):
        assert unknown_keys(conf) == []

    def test_with_strict_an_unknown_key_is_an_error(self):
        for conf, strict in (({"wandb": 1, "strict": True}, None), ({"wandb": 1}, True)):
            with pytest.raises(InvalidArgumentError, match="wandb: unknown"):
                unknown_keys(conf, strict)
        assert unknown_keys({"wandb": 1, "strict": True}, strict=False) == ["wandb: unknown"]
        assert Settings.from_config({"strict": True}).strict


class TestKeysWithOtherNames:
    @pytest.mark.parametrize(("theirs", "ours"), sorted(ALIASES.items()))
    def test_a_key_with_another_name_here_sets_that_key(self, theirs, ours):
        values = {"enabled": True, "path": "/ssd", "required_node_resource": "mem", "durability": "sync"}
        value = {**values, "folder": "/kept"}[theirs.rpartition(".")[2]]
        merged = merge(nested(theirs, value))
        for path in (theirs, ours):
            section = merged
            for name in path.split("."):
                section = section[name]
            assert section == value
        assert unknown_keys(nested(theirs, value)) == []

    def test_the_value_under_the_name_here_counts(self):
        conf = {"backend": {"SimpleStorage": {"ssd_offload": {"path": "/theirs"}, "offload": {"path": "/ours"}}}}
        assert merge(conf).backend.SimpleStorage.offload.path == "/ours"

    def test_rdma_of_yuanrong_becomes_an_argument_of_its_worker(self):
        conf = {"backend": {"Yuanrong": {"enable_rdma": True, "worker_args": "--x 1"}}}
        assert merge(conf).backend.Yuanrong.worker_args == "--x 1 --enable_rdma true"
        assert merge(merge(conf)) == merge(conf)
        assert merge({"backend": {"Yuanrong": {"enable_rdma": False}}}).backend.Yuanrong.worker_args == ""
        assert unknown_keys(conf) == []

    @pytest.mark.parametrize(("path", "advice"), sorted(WITHOUT_COUNTERPART.items()))
    def test_a_key_without_a_counterpart_says_what_to_do(self, path, advice):
        (said,) = unknown_keys(nested(path, {"enabled": True} if path.endswith("offload") else 5))
        assert said == f"{path}: a key of TransferQueue 0.1.11 that has no effect here; {advice}"

    @pytest.mark.parametrize("value", [None, False, 0, "", {}, {"enabled": False, "path": "/x"}])
    def test_a_key_that_is_off_is_not_reported(self, value):
        assert unknown_keys({"backend": {"MooncakeStore": {"offload": value}}}) == []


class TestDifferences:
    IN_FORCE = as_json(merge({"controller": {"polling_mode": True, "sampler": RankAwareSampler}}))

    def test_each_requested_setting_that_differs_is_named(self):
        conf = {"controller": {"polling_mode": False}, "metrics": {"enabled": True, "port": 0}}
        assert differences(conf, self.IN_FORCE) == [
            "controller.polling_mode: requested false, in force true",
            "metrics.enabled: requested true, in force false",
        ]

    def test_defaults_and_unknown_keys_are_not_compared(self):
        assert differences(None, self.IN_FORCE) == differences({"mine": 5}, self.IN_FORCE) == []

    @pytest.mark.parametrize(
        "sampler",
        [RankAwareSampler, RankAwareSampler(), "RankAwareSampler", "transfer_queue.sampler:RankAwareSampler"],
    )
    def test_a_sampler_is_the_same_as_class_instance_and_path(self, sampler):
        assert differences({"controller": {"sampler": sampler}}, self.IN_FORCE) == []

    def test_settings_that_name_the_system_are_not_compared(self):
        conf = {"system": {"name": "x", "folder": "/y"}, "runtime": "local", "timeouts": {"start": 5}}
        assert differences(conf, self.IN_FORCE) == []
