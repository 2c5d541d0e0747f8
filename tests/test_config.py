"""The merged conf, the settings for the servers, the environment."""

from __future__ import annotations

import importlib.resources
import json
import logging
import pickle
import subprocess
import sys

import pytest
from omegaconf import DictConfig, OmegaConf

from transfer_queue import config
from transfer_queue.config import KEYS, Settings, sampler_from
from transfer_queue.config_tree import merge
from transfer_queue.errors import InvalidArgumentError, StartError
from transfer_queue.sampler import BaseSampler, GRPOGroupNSampler, RankAwareSampler, SequentialSampler


class Newest(BaseSampler):
    """A sampler of a user's."""

    def sample(self, ready_indexes, batch_size, *args, **kwargs):
        rows = list(ready_indexes)[-batch_size:]
        return rows, rows


class NeedsAnArgument(Newest):
    def __init__(self, bound):
        super().__init__()
        self.bound = bound


def held(value) -> DictConfig:
    """A conf that holds an object as its sampler."""
    conf = OmegaConf.create({"controller": {"sampler": value}}, flags={"allow_objects": True})
    assert isinstance(conf, DictConfig)
    return conf


class TestMerge:
    def test_nothing_is_the_defaults(self):
        """merge(None) and merge({}) are the resource as it stands."""
        text = (importlib.resources.files("transfer_queue") / "config.yaml").read_text("utf-8")
        assert merge() == merge({}) == OmegaConf.create(text)

    def test_over_the_defaults(self):
        """What is given wins, key by key."""
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
        """Objects are kept where the conf allows objects, and in a dict."""
        sampler = RankAwareSampler()
        assert merge(held(sampler)).controller.sampler is sampler
        assert merge({"controller": {"sampler": Newest}}).controller.sampler is Newest

    def test_interpolation_to_the_outside(self):
        """A node of a larger conf is taken with what it refers to there."""
        whole = OmegaConf.create({"polling": True, "queue": {"controller": {"polling_mode": "${polling}"}}})
        assert merge(whole.queue).controller.polling_mode is True

    def test_interpolation_to_a_default(self):
        """An interpolation may refer to a default."""
        assert merge({"mine": "${backend.storage_backend}"}).mine == "SimpleStorage"

    def test_missing_value(self):
        """A value that is still missing ("???") leaves the default."""
        assert merge({"controller": {"sampler": "???"}}).controller.sampler == "SequentialSampler"

    def test_merging_twice(self):
        """A merged conf over the defaults is itself."""
        once = merge({"mine": 1, "metrics": {"port": 9000}})
        assert merge(once) == once

    def test_pickles(self):
        """A merged conf pickles."""
        merged = merge({"mine": 1})
        assert pickle.loads(pickle.dumps(merged)) == merged

    @pytest.mark.parametrize("conf", [5, "text", ["controller"]])
    def test_no_mapping(self, conf):
        """Anything but a mapping is refused."""
        with pytest.raises(InvalidArgumentError, match="conf is"):
            merge(conf)


class TestSettings:
    def test_defaults(self):
        """The defaults are valid, and are these."""
        assert Settings.from_config().to_json() == {
            "name": None,
            "runtime": "auto",
            "sampler": "SequentialSampler",
            "sampler_args": {},
            "polling_mode": False,
            "journal_durability": "async",
            "journal_folder": None,
            "max_deliveries": 16,
            "storage_backend": "SimpleStorage",
            "total_storage_size": None,
            "num_data_storage_units": None,
            "replicas": 1,
            "arena_bytes": None,
            "arena_folder": None,
            "offload_path": None,
            "offload_high": 0.8,
            "offload_low": 0.6,
            "offload_bytes": None,
            "metrics_enabled": False,
            "metrics_port": 0,
            "metrics_host": "127.0.0.1",
            "allow_pickle": True,
            "tls": None,
            "start_timeout": 30.0,
            "call_timeout": 60.0,
            "restart_timeout": 60.0,
            "report_wait": 30.0,
            "ray_namespace": "transfer_queue",
            "ray_detached": False,
            "ray_restart_seconds": 60.0,
            "ray_actor_options": {},
            "ray_node_resource": None,
            "store_options": {},
            "strict": False,
            "sampler_isolation": "process",
            "sampler_timeout": 30.0,
        }

    def test_json(self):
        """Settings travel as JSON, and back; what a newer release adds is left out."""
        settings = Settings.from_config({"backend": {"SimpleStorage": {"total_storage_size": 5}}})
        values = json.loads(json.dumps(settings.to_json()))
        assert Settings.from_json({**values, "newer": 1}) == settings

    def test_keys_are_those_of_the_resource(self):
        """Every field has a key of the conf, and every key a default."""
        assert set(KEYS) == set(Settings.from_config().to_json())
        for key in KEYS.values():
            parent, _, leaf = key.rpartition(".")
            assert leaf in (OmegaConf.select(merge(), parent) if parent else merge())

    def test_replicas_need_as_many_units(self):
        """Two places of a value lie in two units."""
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
            ("controller.journal", True),
            ("controller.journal.durability", "maybe"),
            ("controller.journal.durability", None),
            ("controller.journal.folder", "relative/path"),
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
        """null is a value for what may be unlimited or chosen."""
        assert getattr(Settings.from_config({"backend": {"SimpleStorage": {key: None}}}), key) is None

    def test_offload(self):
        """A path counts where it is enabled, and is needed then."""
        offload = {"enabled": True, "path": "/disk", "high_watermark": 1, "low_watermark": 0.5}
        settings = Settings.from_config({"backend": {"SimpleStorage": {"offload": offload}}})
        assert (settings.offload_path, settings.offload_high, settings.offload_low) == ("/disk", 1.0, 0.5)
        offload["enabled"] = False
        assert Settings.from_config({"backend": {"SimpleStorage": {"offload": offload}}}).offload_path is None
        with pytest.raises(InvalidArgumentError, match=r"offload\.path is None; allowed: an absolute path"):
            Settings.from_config({"backend": {"SimpleStorage": {"offload": {"enabled": True}}}})

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
        """They are looked at where it is the backend, and travel as a whole."""
        conf = {"backend": {"storage_backend": backend, backend: {key: value}}}
        with pytest.raises(InvalidArgumentError, match=rf"backend\.{backend}\.{key} is {value!r}; allowed: "):
            Settings.from_config(conf)
        del conf["backend"][backend]
        settings = Settings.from_config(conf)
        assert set(settings.store_options) == set(merge(None).backend[backend])
        assert settings.num_data_storage_units == 1
        assert Settings.from_json(json.loads(json.dumps(settings.to_json()))) == settings
        conf["backend"]["storage_backend"] = "SimpleStorage"
        conf["backend"][backend] = {key: value}
        assert Settings.from_config(conf).store_options == {}

    def test_a_store_of_ones_own(self):
        conf = {"backend": {"storage_backend": "mine.store:Store", "options": {"where": "/x"}}}
        settings = Settings.from_config(conf)
        assert (settings.storage_backend, settings.store_options) == ("mine.store:Store", {"where": "/x"})
        for wrong in ({"options": 5}, {"SimpleStorage": {"replicas": 2, "num_data_storage_units": 2}}):
            with pytest.raises(InvalidArgumentError):
                Settings.from_config({"backend": {**conf["backend"], **wrong}})

    def test_a_direct_transport_needs_a_capacity(self):
        """As what lies in the keeper's memory Ray does not spill."""
        conf = {"storage_backend": "RayStore", "RayStore": {"direct_transport": "nixl"}}
        with pytest.raises(InvalidArgumentError, match=r"backend\.RayStore\.capacity is None; allowed: bytes where"):
            Settings.from_config({"backend": conf})
        conf["RayStore"]["capacity"] = 1 << 30
        options = Settings.from_config({"backend": conf}).store_options
        assert options == {"capacity": 1 << 30, "direct_transport": "nixl"}

    def test_a_store_that_needs_ray(self):
        settings = Settings.from_config({"backend": {"storage_backend": "RayStore"}})
        settings.check_runtime(under_ray=True)
        with pytest.raises(StartError, match="needs runtime: ray"):
            settings.check_runtime(under_ray=False)

    def test_tls(self):
        """Three absolute paths, interpolations resolved, or none; they travel."""
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
        """A class that another process can import travels by its path; an object must travel itself."""
        assert Settings.from_config(held(Newest)).sampler == f"{__name__}:Newest"
        assert Settings.from_config(held(Newest())).sampler is None

        class Local(Newest):
            pass

        assert Settings.from_config(held(Local)).sampler is None

    def test_sampler_object(self):
        """Whatever is not built in travels with the caller's import paths."""
        sampler = Newest()
        assert config.sampler_object(held(sampler)) is sampler
        assert config.sampler_object(held(Newest)) is Newest
        assert config.sampler_object(held(f"{__name__}:Newest")) is Newest
        assert config.sampler_object(held("RankAwareSampler")) is None
        assert config.sampler_object(None) is None


NEEDED = {
    "TokenBudgetSampler": {"token_budget": 8},
    "FreshnessSampler": {"max_staleness": 1, "inner": "SequentialSampler"},
}


class TestSamplerFrom:
    @pytest.mark.parametrize("name", config.SAMPLERS)
    def test_built_in(self, name):
        """A built-in name."""
        assert type(sampler_from(name, NEEDED.get(name))).__name__ == name

    def test_arguments(self):
        """Arguments by name; samplers inside of others by name or with arguments of their own."""
        grpo = sampler_from("GRPOGroupNSampler", {"n_samples_per_prompt": 4})
        assert grpo.n_samples_per_prompt == 4
        path = f"{__name__}:NeedsAnArgument"
        assert sampler_from(path, {"bound": 3}).bound == 3
        inner = {"sampler": "PrioritySampler", "sampler_args": {"aging": 2, "inner": "RankAwareSampler"}}
        sampler = sampler_from("FreshnessSampler", {"max_staleness": 1, "inner": inner})
        assert (type(sampler.inner).__name__, sampler.inner.aging) == ("PrioritySampler", 2.0)
        assert type(sampler.inner.inner).__name__ == "RankAwareSampler"

    @pytest.mark.parametrize(
        ("sampler", "args", "words"),
        [
            ("TokenBudgetSampler", {"token_budget": 0}, "arguments of TokenBudgetSampler .token_budget must be posit"),
            ("TokenBudgetSampler", {"budget": 8}, "arguments of TokenBudgetSampler .*'budget'"),
            ("TokenBudgetSampler", {}, " is .*made without arguments, or with controller.sampler_args"),
            ("FreshnessSampler", {"max_staleness": 1, "inner": {"name": "X"}}, "has the keys sampler and sampler_args"),
            ("FreshnessSampler", {"max_staleness": 1, "inner": "Nobody"}, "'Nobody'; allowed"),
            ("FreshnessSampler", {"max_staleness": 1, "inner": 5}, "inner of FreshnessSampler must be a sampler"),
            ("SequentialSampler", {"inner": object()}, "plain values, or pass an instance"),
            ("SequentialSampler", [1], "a mapping of the arguments"),
            (GRPOGroupNSampler(2), {"n_samples_per_prompt": 2}, "nothing where controller.sampler is an instance"),
        ],
    )
    def test_wrong_arguments(self, sampler, args, words):
        """Wrong arguments are found where the conf is read, and named by their key."""
        conf = held(sampler)
        conf.controller.sampler_args = args
        with pytest.raises(InvalidArgumentError, match=f"controller.sampler.*{words}"):
            Settings.from_config(conf)

    def test_arguments_travel(self):
        """As JSON values, interpolations resolved."""
        args = {"token_budget": "${controller.budget}", "dp_size": 2}
        conf = {"controller": {"sampler": "TokenBudgetSampler", "sampler_args": args, "budget": 64}}
        settings = Settings.from_config(conf)
        assert Settings.from_json(settings.to_json()).sampler_args == {"token_budget": 64, "dp_size": 2}
        assert Settings.from_config().sampler_args == {}
        assert Settings.from_config({"controller": {"sampler_args": None}}).sampler_args == {}

    @pytest.mark.parametrize("separator", [":", "."])
    def test_import_path(self, separator):
        """ "package.module:Class" and "package.module.Class"."""
        path = f"transfer_queue.sampler.sequential_sampler{separator}SequentialSampler"
        assert type(sampler_from(path)) is SequentialSampler

    def test_class_and_instance(self):
        """A class is made, an instance stays itself."""
        sampler = GRPOGroupNSampler(4)
        assert sampler_from(sampler) is sampler
        assert type(sampler_from(Newest)) is Newest

    def test_any_object_that_samples(self):
        """An object with a `sample` is a sampler, whatever its class."""

        class Duck:
            def sample(self, ready_indexes, batch_size, *args, **kwargs):
                return [], []

        assert type(sampler_from(Duck)) is Duck

    @pytest.mark.parametrize("name", ["NoSuchSampler", "no.such.module:Sampler", "json:NoSuchClass", "", ":", "a:"])
    def test_unknown(self, name):
        """An unknown name is a ValueError naming it."""
        with pytest.raises(ValueError, match=r"controller\.sampler") as error:
            sampler_from(name)
        assert repr(name) in str(error.value)

    @pytest.mark.parametrize("value", ["json:dumps", "json:JSONDecoder", 5, None, dict])
    def test_no_sampler(self, value):
        """What is no sampler is refused, with what would be one."""
        with pytest.raises(InvalidArgumentError, match="allowed: "):
            sampler_from(value)

    def test_class_that_needs_arguments(self):
        """Of a class that cannot be made, an instance is asked for."""
        with pytest.raises(InvalidArgumentError, match="an instance"):
            sampler_from(NeedsAnArgument)


NUMBERS = [
    ("TQ_PRE_ALLOC_SAMPLE_NUM", config.pre_alloc_sample_num, 1, "8", 8),
    ("TQ_STREAMING_DATASET_EMPTY_BATCH_SLEEP_INTERVAL", config.empty_batch_sleep_interval, 1.0, "0.25", 0.25),
    ("TQ_CONTROLLER_GET_METADATA_TIMEOUT", config.get_metadata_timeout, 60.0, "5", 5.0),
]
FOLDERS = [("TQ_RUNTIME_DIR", config.runtime_dir), ("TQ_ADDRESS", config.address)]


class TestEnvironment:
    @pytest.mark.parametrize(("name", "read", "default", "text", "value"), NUMBERS)
    def test_numbers(self, name, read, default, text, value, monkeypatch):
        """Numbers are read at the moment of the call; unset or empty is the default."""
        monkeypatch.delenv(name, raising=False)
        assert read() == default
        monkeypatch.setenv(name, "")
        assert read() == default
        monkeypatch.setenv(name, f" {text} ")
        assert read() == value

    @pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf"])
    @pytest.mark.parametrize(("name", "read"), [(row[0], row[1]) for row in NUMBERS])
    def test_nonsense(self, name, read, text, monkeypatch):
        """Nonsense is an error naming the variable and its value."""
        monkeypatch.setenv(name, text)
        with pytest.raises(InvalidArgumentError, match=f"{name} is '{text}'; allowed: "):
            read()

    def test_half_a_sample(self, monkeypatch):
        """TQ_PRE_ALLOC_SAMPLE_NUM is a whole number."""
        monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "1.5")
        with pytest.raises(InvalidArgumentError, match="whole number"):
            config.pre_alloc_sample_num()

    @pytest.mark.parametrize(("name", "read"), FOLDERS)
    def test_folders(self, name, read, monkeypatch, tmp_path):
        """Folders are absolute paths, None where unset."""
        monkeypatch.delenv(name, raising=False)
        assert read() is None
        monkeypatch.setenv(name, str(tmp_path))
        assert read() == str(tmp_path)
        monkeypatch.setenv(name, "relative")
        with pytest.raises(InvalidArgumentError, match=f"{name} is 'relative'; allowed: an absolute path"):
            read()

    def test_system_name(self, monkeypatch):
        """TQ_SYSTEM is a name, None where unset."""
        monkeypatch.delenv("TQ_SYSTEM", raising=False)
        assert config.system_name() is None
        monkeypatch.setenv("TQ_SYSTEM", "train-1")
        assert config.system_name() == "train-1"
        monkeypatch.setenv("TQ_SYSTEM", "../elsewhere")
        with pytest.raises(InvalidArgumentError, match="TQ_SYSTEM"):
            config.system_name()

    @pytest.mark.parametrize(
        ("text", "level"), [("DEBUG", logging.DEBUG), ("info", logging.INFO), ("15", 15), ("", None)]
    )
    def test_logging_level(self, text, level, monkeypatch):
        """TQ_LOGGING_LEVEL is a level by name or number."""
        monkeypatch.setenv("TQ_LOGGING_LEVEL", text)
        assert config.logging_level() == level

    @pytest.mark.parametrize("text", ["LOUD", "0", "-5"])
    def test_logging_nonsense(self, text, monkeypatch):
        """Nonsense is an error with the names of the levels."""
        monkeypatch.setenv("TQ_LOGGING_LEVEL", text)
        with pytest.raises(InvalidArgumentError, match=f"TQ_LOGGING_LEVEL is '{text}'; allowed: DEBUG"):
            config.logging_level()


LOGGING = """
import logging, os, sys
{before}
from transfer_queue.utils.logging_utils import get_logger
for _ in range(3):
    logger = get_logger("transfer_queue.part")
logger.info("an info"); logger.warning("a warning")
get_logger("transfer_queue").warning("of the root")
print(len(logging.getLogger().handlers), len(logging.getLogger("transfer_queue").handlers), len(logger.handlers))
"""


class TestLogger:
    def run(self, before="", **environment):
        """Standard output and error of a process that logs."""
        import os

        env = {name: value for name, value in os.environ.items() if name != "TQ_LOGGING_LEVEL"}
        code = LOGGING.format(before=before)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**env, **environment})
        assert done.returncode == 0, done.stderr
        return done.stdout.split(), done.stderr.splitlines()

    def test_one_handler(self):
        """One handler, on the package's own root logger; each record once; warnings by default."""
        handlers, lines = self.run()
        assert handlers == ["0", "1", "0"]
        assert [line.rpartition(" WARNING ")[2] for line in lines] == [
            "transfer_queue.part: a warning",
            "transfer_queue: of the root",
        ]

    def test_environment(self):
        """TQ_LOGGING_LEVEL sets the level."""
        assert len(self.run(TQ_LOGGING_LEVEL="INFO")[1]) == 3
        assert self.run(TQ_LOGGING_LEVEL="ERROR")[1] == []

    def test_program_that_logs_itself(self):
        """Where the program configures logging, its handlers write, and each record once."""
        _, lines = self.run("logging.basicConfig(format='mine %(message)s')")
        assert lines == ["mine a warning", "mine of the root"]

    def test_program_that_sets_the_level(self):
        """A level that the program sets for the package holds for its loggers."""
        assert len(self.run("logging.getLogger('transfer_queue').setLevel('DEBUG')")[1]) == 3

    def test_default_level(self):
        """default_level is that of a logger without TQ_LOGGING_LEVEL."""
        _, lines = self.run(
            "from transfer_queue.utils.logging_utils import get_logger as g; g('transfer_queue.part', 'INFO')"
        )
        assert len(lines) == 3
