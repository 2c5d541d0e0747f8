"""Defaults, what is allowed for each setting, and settings as JSON."""

from __future__ import annotations

import json

import pytest
from omegaconf import DictConfig, OmegaConf

from transfer_queue.config.declaration import declared_settings
from transfer_queue.config.loading import merge
from transfer_queue.config.settings import Settings
from transfer_queue.errors import InvalidArgumentError, StartError
from transfer_queue.sampler import BaseSampler


class Newest(BaseSampler):
    """A user's sampler."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        rows = list(ready_indexes)[-batch_size:]
        return rows, rows


def held(value) -> DictConfig:
    """Return a conf with an object as its sampler."""
    return OmegaConf.create({"controller": {"sampler": value}}, flags={"allow_objects": True})


class TestSettings:
    def test_defaults(self):
        """Without a conf, each setting has its declared default; `test_declaration` has the file that shows them."""
        declared = {name: each.default for name, each in declared_settings(Settings).items()}
        del declared["offload_enabled"]  # `from_config` expresses it by `offload_path`, which is None
        assert Settings.from_config().to_json() == {**declared, "sampler_args": {}}

    def test_json(self):
        """Settings can be converted to JSON and back; entries of a newer release are ignored."""
        settings = Settings.from_config({"backend": {"SimpleStorage": {"total_storage_size": 5}}})
        values = json.loads(json.dumps(settings.to_json()))
        assert Settings.from_json({**values, "newer": 1}) == settings

    def test_replicas_need_as_many_units(self):
        """Two replicas of a value are in two units."""
        two = {"backend": {"SimpleStorage": {"replicas": 2, "num_data_storage_units": 2}}}
        assert Settings.from_config(two).replicas == 2
        two["backend"]["SimpleStorage"]["num_data_storage_units"] = 1
        with pytest.raises(InvalidArgumentError, match="num_data_storage_units is 1"):
            Settings.from_config(two)

    def test_a_round_float_is_a_number(self):
        """YAML reads 1e6 as a float; it means a million rows."""
        conf = OmegaConf.create("backend: {SimpleStorage: {total_storage_size: 1e6}}")
        assert Settings.from_config(conf).total_storage_size == 1_000_000

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("system.name", "a/b"),
            ("system.name", ".."),
            ("system.name", ""),
            ("system.name", "x" * 65),
            ("system.name", 5),
            ("runtime", "cluster"),
            ("ray.namespace", ""),
            ("ray.detached", "yes"),
            ("ray.restart_seconds", 0),
            ("ray.actor_options", 5),
            ("ray.actor_options", {"name": "other"}),
            ("controller", None),
            ("controller", "SequentialSampler"),
            ("controller.max_deliveries", -1),
            ("controller.polling_mode", "yes"),
            ("controller.polling_mode", 1),
            ("controller.polling_mode", None),
            ("durability", True),
            ("durability.values", "disk"),
            ("durability.values", None),
            ("durability.mode", "maybe"),
            ("durability.mode", None),
            ("durability.folder", "relative/path"),
            ("backend.storage_backend", "Simple"),
            ("backend.storage_backend", None),
            ("backend.SimpleStorage.total_storage_size", 0),
            ("backend.SimpleStorage.total_storage_size", 1.5),
            ("backend.SimpleStorage.num_data_storage_units", 0),
            ("backend.SimpleStorage.num_data_storage_units", True),
            ("backend.SimpleStorage.replicas", 0),
            ("backend.SimpleStorage.replicas", 3),
            ("backend.SimpleStorage.arena_bytes", -1),
            ("backend.SimpleStorage.arena_bytes", 65535),
            ("backend.SimpleStorage.arena_folder", "relative/path"),
            ("backend.SimpleStorage.offload.enabled", "yes"),
            ("backend.SimpleStorage.offload.path", "relative/path"),
            ("backend.SimpleStorage.offload.high_watermark", 0),
            ("backend.SimpleStorage.offload.high_watermark", 1.5),
            ("backend.SimpleStorage.offload.low_watermark", True),
            ("backend.SimpleStorage.offload.low_watermark", 0.8),
            ("backend.SimpleStorage.offload.capacity", 65535),
            ("metrics.enabled", "on"),
            ("metrics.port", 65536),
            ("metrics.port", -1),
            ("metrics.host", ""),
            ("metrics.compatible_names", "yes"),
            ("timeline.events", -1),
            ("timeline.events", 1.5),
            ("security.allow_pickle", "no"),
            ("security.tls", True),
            ("security.tls", "/a/certificate.pem"),
            ("security.tls", {"certificate": "/a/c", "private_key": "/a/k"}),
            ("security.tls", {"certificate": "/a/c", "private_key": "/a/k", "authority": "/a/a", "also": 1}),
            ("timeouts.start", 0),
            ("timeouts.start", "soon"),
            ("timeouts.call", float("nan")),
            ("timeouts.call", float("inf")),
            ("timeouts.report_wait", 0),
            ("timeouts.report_wait", "often"),
        ],
    )
    def test_refused(self, key, value):
        """An error names the key, the value and what is allowed."""
        conf = OmegaConf.create({})
        OmegaConf.update(conf, key, value)
        with pytest.raises(InvalidArgumentError) as error:
            Settings.from_config(conf)
        text = str(error.value)
        assert text.startswith(f"{key} is {value!r}; allowed: ")
        assert len(text) > len(f"{key} is {value!r}; allowed: ")

    @pytest.mark.parametrize("key", ["total_storage_size", "arena_bytes", "arena_folder"])
    def test_null_means_unset(self, key):
        """null is allowed for a setting that may be unlimited or chosen by the system."""
        assert getattr(Settings.from_config({"backend": {"SimpleStorage": {key: None}}}), key) is None

    def test_offload(self):
        """A path is used only if offloading is enabled, and is required then."""
        offload = {"enabled": True, "path": "/disk", "high_watermark": 1, "low_watermark": 0.5}
        settings = Settings.from_config({"backend": {"SimpleStorage": {"offload": offload}}})
        assert (settings.offload_path, settings.offload_high, settings.offload_low) == ("/disk", 1.0, 0.5)
        offload["enabled"] = False
        assert Settings.from_config({"backend": {"SimpleStorage": {"offload": offload}}}).offload_path is None
        with pytest.raises(InvalidArgumentError, match=r"offload\.path is None; allowed: an absolute path"):
            Settings.from_config({"backend": {"SimpleStorage": {"offload": {"enabled": True}}}})

    def test_values_that_survive_need_a_folder_a_journal_and_memory_of_this_machine(self):
        conf = {"durability": {"values": "processes", "folder": "/kept"}}
        settings = Settings.from_config(conf)
        assert (settings.durability_values, settings.durability_folder) == ("processes", "/kept")
        settings.check_runtime(under_ray=False)
        with pytest.raises(StartError, match=r"needs runtime: local; set durability\.values to machine"):
            settings.check_runtime(under_ray=True)
        on_disk = Settings.from_config({"durability": {"values": "machine", "folder": "/shared"}})
        on_disk.check_runtime(under_ray=True)
        on_disk.check_runtime(under_ray=False)
        assert on_disk.controller_moves
        for wrong, words in (
            (
                {"durability": {"values": "processes"}},
                r"durability\.folder is None; allowed: an absolute path, because",
            ),
            (
                {"durability": {**conf["durability"], "mode": "none"}},
                r"durability\.mode is 'none'; allowed: async or sync, because durability\.values is processes",
            ),
            (
                {**conf, "backend": {"storage_backend": "MooncakeStore"}},
                r"durability\.values is 'processes'; allowed: none with the backend MooncakeStore",
            ),
            (
                {**conf, "backend": {"fields": {"pixels": "MooncakeStore"}}},
                r"durability\.values is 'processes'; allowed: none with the backend MooncakeStore",
            ),
        ):
            with pytest.raises(InvalidArgumentError, match=words):
                Settings.from_config(wrong)

    def test_values_on_disk_are_the_second_copy_and_their_lag_has_two_limits(self):
        kept = {"values": "machine", "folder": "/kept"}
        assert Settings.from_config({"durability": kept}).max_lag == (1 << 30, 10.0)
        assert Settings.from_config({"durability": {**kept, "mode": "sync"}}).max_lag == (-1, 0.0)
        assert Settings.from_config({"durability": {**kept, "values": "processes"}}).max_lag is None
        limits = {"bytes": 0, "seconds": 0.5}
        assert Settings.from_config({"durability": {**kept, "max_lag": limits}}).max_lag == (0, 0.5)
        units = {"SimpleStorage": {"num_data_storage_units": 2, "replicas": 2}}
        with pytest.raises(InvalidArgumentError, match=r"replicas is 2; allowed: 1 with durability\.values machine"):
            Settings.from_config({"durability": kept, "backend": units})

    @pytest.mark.parametrize(
        ("backend", "key", "value"),
        [
            ("MooncakeStore", "auto_init", 1),
            ("MooncakeStore", "protocol", "udp"),
            ("MooncakeStore", "global_segment_size", -1),
            ("MooncakeStore", "master_server_address", None),
            ("MooncakeStore", "use_gdr", "yes"),
            ("Yuanrong", "worker_port", 70000),
            ("Yuanrong", "worker_args", None),
            ("RayStore", "direct_transport", "gloo"),
            ("RayStore", "direct_transport", True),
        ],
    )
    def test_options_of_a_store(self, backend, key, value):
        """They are checked if the store is the backend, and are sent to servers together."""
        conf = {"backend": {"storage_backend": backend, backend: {key: value}}}
        with pytest.raises(InvalidArgumentError, match=rf"backend\.{backend}\.{key} is {value!r}; allowed: "):
            Settings.from_config(conf)
        del conf["backend"][backend]
        settings = Settings.from_config(conf)
        assert set(settings.store_options[backend]) == set(merge(None).backend[backend])
        assert settings.num_data_storage_units == 1
        assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
        conf["backend"]["storage_backend"] = "SimpleStorage"
        conf["backend"][backend] = {key: value}
        assert Settings.from_config(conf).store_options == {}

    def test_the_options_of_a_store_with_an_import_path(self):
        conf = {"backend": {"storage_backend": "mine.store:Store", "options": {"where": "/x"}}}
        settings = Settings.from_config(conf)
        assert (settings.storage_backend, settings.store_options) == (
            "mine.store:Store",
            {"mine.store:Store": {"where": "/x"}},
        )
        for wrong in ({"options": 5}, {"SimpleStorage": {"replicas": 2, "num_data_storage_units": 2}}):
            with pytest.raises(InvalidArgumentError):
                Settings.from_config({"backend": {**conf["backend"], **wrong}})

    def test_a_direct_transport_needs_a_capacity(self):
        """Ray does not spill the memory of the store's actor to disk."""
        conf = {"storage_backend": "RayStore", "RayStore": {"direct_transport": "nixl"}}
        with pytest.raises(InvalidArgumentError, match=r"backend\.RayStore\.capacity is None; allowed: bytes if"):
            Settings.from_config({"backend": conf})
        conf["RayStore"]["capacity"] = 1 << 30
        options = Settings.from_config({"backend": conf}).store_options["RayStore"]
        assert options == {"capacity": 1 << 30, "direct_transport": "nixl"}

    @pytest.mark.parametrize("backend", [{"storage_backend": "RayStore"}, {"fields": {"x": "RayStore"}}], ids=list)
    def test_a_store_that_needs_ray(self, backend):
        settings = Settings.from_config({"backend": backend})
        settings.check_runtime(under_ray=True)
        with pytest.raises(StartError, match="needs runtime: ray"):
            settings.check_runtime(under_ray=False)

    def test_a_backend_for_some_fields(self):
        """The options of each backend are checked, and the patterns keep their order."""
        fields = {"pixel_*": "MooncakeStore", "*": "mine:Store", "a.b": "SimpleStorage"}
        conf = {"fields": fields, "MooncakeStore": {"global_segment_size": 5}, "options": {"where": "/x"}}
        settings = Settings.from_config({"backend": {**conf, "SimpleStorage": {"num_data_storage_units": 3}}})
        assert list(settings.field_backends.items()) == list(fields.items())
        assert settings.backends == ["SimpleStorage", "MooncakeStore", "mine:Store"]
        assert settings.stores == ["MooncakeStore", "mine:Store"]
        assert settings.has_arenas
        assert settings.num_data_storage_units == 3
        assert settings.store_options["MooncakeStore"]["global_segment_size"] == 5
        assert settings.store_options["mine:Store"] == {"where": "/x"}
        again = Settings.from_json(json.loads(json.dumps(settings.to_json())))
        assert again == settings
        assert list(again.field_backends) == list(fields)
        with pytest.raises(InvalidArgumentError, match=r"backend\.MooncakeStore\.global_segment_size is -1"):
            Settings.from_config({"backend": {**conf, "MooncakeStore": {"global_segment_size": -1}}})

    @pytest.mark.parametrize(
        "wrong",
        [
            {"fields": 5},
            {"fields": {"x": "Mooncake"}},
            {"fields": {"x": None}},
            {"fields": {"": "Yuanrong"}},
            {"fields": {"x": "one:Store", "y": "another:Store"}},
            {"fields": {"x": "Yuanrong"}, "Yuanrong": {"worker_port": 70000}},
            {"fields": {"x": "RayStore"}, "RayStore": {"direct_transport": "nixl"}},
        ],
    )
    def test_wrong_backends_of_fields(self, wrong):
        with pytest.raises(InvalidArgumentError, match=r"backend\.(fields|Yuanrong|RayStore)"):
            Settings.from_config({"backend": wrong})

    def test_tls(self):
        """Three absolute paths with interpolations resolved, or none; they are sent to servers."""
        files = {"certificate": "${folder}/c.crt", "private_key": "/b/c.key", "authority": "/b/a.crt"}
        settings = Settings.from_config({"security": {"tls": files}, "folder": "/a"})
        assert settings.tls == {"certificate": "/a/c.crt", "private_key": "/b/c.key", "authority": "/b/a.crt"}
        assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
        for name in files:
            for path in ("relative.pem", None, 5):
                with pytest.raises(
                    InvalidArgumentError, match=rf"security\.tls\.{name} is {path!r}; allowed: the absol"
                ):
                    Settings.from_config({"security": {"tls": {**files, name: path}}, "folder": "/a"})

    def test_sampler_as_a_path(self):
        """A class that another process can import is sent by its path; an object must be pickled."""
        assert Settings.from_config(held(Newest)).sampler == f"{__name__}:Newest"
        assert Settings.from_config(held(Newest())).sampler is None

        class Local(Newest):
            pass

        assert Settings.from_config(held(Local)).sampler is None
