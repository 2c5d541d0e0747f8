"""The settings: each is declared here once, with its key, its default, what is allowed, and what it means.

`config.yaml`, `tq start --help` and the page `docs/reference/configuration.md` are made of these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

from transfer_queue.config.declaration import Setting, declared_settings, setting
from transfer_queue.config.loading import merge, select
from transfer_queue.config.store_options import (
    OPTIONS,
    SIMPLE,
    SMALLEST_STORAGE,
    STORE_OPTIONS,
    validated_store_options,
)
from transfer_queue.config.validators import (
    AbsolutePath,
    Boolean,
    Choice,
    FieldBackends,
    Fraction,
    OrNull,
    Patterns,
    PlainMapping,
    SamplerReference,
    Seconds,
    SystemName,
    TaskSampler,
    TaskSamplers,
    Text,
    TlsFiles,
    WholeNumber,
    is_loopback,
    not_allowed,
)
from transfer_queue.errors import StartError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SYSTEM = ""
"""What `Settings.samplers` has for `controller.sampler`, in place of the name of a task."""

_BACKEND = Choice(SIMPLE, *STORE_OPTIONS, or_import_path=True)

SECTIONS = {
    "ray": "Settings that apply under Ray.",
    "durability": (
        "Which failures the state and the values survive. The state is in a journal, so that a controller that was "
        "killed continues with it. docs/reliability.md says what each level costs."
    ),
    "backend.SimpleStorage": "The storage that is built in: shared memory of each node.",
    "backend.SimpleStorage.offload": (
        "A disk tier. If more than `high_watermark` of a unit's bytes are in use, the oldest blocks move to a folder "
        "on an SSD until `low_watermark` is reached. They are read from there as from memory. The bytes of a unit are "
        "`arena_bytes`, or its share of its file system."
    ),
    **{f"backend.{name}": options.__doc__ or "" for name, options in STORE_OPTIONS.items()},
}
"""What the settings of a section have in common."""


@dataclass(frozen=True)
class Settings:
    """The settings of one system, checked and converted. Servers get them as JSON.

    Example:
        >>> from transfer_queue.config.settings import Settings
        >>> Settings.from_config({"metrics": {"enabled": True}}).metrics_enabled
        True
        >>> Settings.from_config({"metrics": {"port": -1}})
        Traceback (most recent call last):
        transfer_queue.errors.InvalidArgumentError: metrics.port is -1; allowed: a whole number from 0 to 65535
    """

    strict: bool = setting(
        "strict",
        False,
        Boolean(),
        "Whether an unknown key is an error, in this configuration and in the `sampling_config` of a fetch. false: an "
        "unknown key is kept, and a warning names it and the nearest known key. In `tq start` an unknown key is always "
        "an error.",
    )
    name: str | None = setting(
        "system.name",
        None,
        OrNull(SystemName()),
        "The name of the system that `init` starts or attaches to. null: the value of TQ_SYSTEM, or one name for each "
        "user.",
    )
    runtime: str = setting(
        "runtime",
        "auto",
        Choice("auto", "local", "ray"),
        "What runs the servers. local: processes of this machine. ray: a Ray actor starts them. auto: ray if this "
        "process has called `ray.init()` or RAY_ADDRESS is set, otherwise local.",
    )
    ray_namespace: str = setting(
        "ray.namespace",
        "transfer_queue",
        Text(),
        "The namespace of the controller's actor. The name of the actor is TransferQueueController, followed by "
        "`-<system.name>` if the system has a name, so that a cluster can have several systems.",
    )
    ray_detached: bool = setting(
        "ray.detached",
        False,
        Boolean(),
        "Whether the system continues until `tq stop` when the driver that started it ends.",
    )
    ray_restart_seconds: float = setting(
        "ray.restart_seconds",
        60,
        Seconds(),
        "How long the servers wait for Ray to restart their actor after it died. They end after this time if Ray does "
        "not restart the actor, for example because the driver has died.",
    )
    ray_node_resource: str | None = setting(
        "ray.node_resource",
        None,
        OrNull(Text()),
        "A resource of Ray: only nodes that have it get storage units. null: all nodes get them.",
    )
    ray_actor_options: dict[str, Any] = setting(
        "ray.actor_options",
        {},
        PlainMapping(
            reserved=("name", "namespace", "lifetime", "get_if_exists"),
            instead="set system.name, ray.namespace and ray.detached instead",
        ),
        "Options of the controller's actor, as `ray.remote` takes them, for example {runtime_env: {...}, resources: "
        "{...}, max_restarts: 3}. By default the actor reserves no CPU, and Ray restarts it each time it dies "
        "(max_restarts: -1), on the same node, or on another one with a `durability.folder` that all nodes see.",
    )
    sampler: str | None = setting(
        "controller.sampler",
        "SequentialSampler",
        SamplerReference(),
        "The sampler that decides which of the ready samples a fetch gets. An instance needs a configuration that "
        "allows objects.",
    )
    sampler_args: dict[str, Any] = setting(
        "controller.sampler_args",
        None,
        PlainMapping(
            content="the arguments of controller.sampler",
            instead="pass an instance as controller.sampler",
            null_is_empty=True,
        ),
        "The arguments with which the class of the sampler is called, by name, for example {token_budget: 16384, "
        "dp_size: 4}. The `inner` of a PrioritySampler or FreshnessSampler is a name, or a mapping with its own "
        "`sampler` and `sampler_args`. null: no arguments.",
    )
    task_samplers: dict[str, TaskSampler] = setting(
        "controller.task_samplers",
        {},
        TaskSamplers(),
        "The samplers of tasks that do not use `controller.sampler`, for example {reward: SequentialSampler, "
        '"train*": {sampler: SeqlenBalancedSampler, sampler_args: {dp_size: 2}}}. A key is the name of a task or a '
        "pattern with `*`, `?` and `[...]`. The name of the task counts first, then the first pattern that fits. A "
        "value is what `controller.sampler` may be, or a mapping with the keys `sampler` and `sampler_args`.",
    )
    sampler_isolation: str = setting(
        "controller.sampler_isolation",
        "process",
        Choice("process", "inline"),
        "Where a sampler runs that is not built in. process: in a separate process, so that a sampler that is slow, "
        "hangs or dies delays only the fetches that use it. inline: in the controller, which answers no other request "
        "while `sample` runs; a small fetch takes less time there.",
    )
    polling_mode: bool = setting(
        "controller.polling_mode",
        False,
        Boolean(),
        "Whether a fetch returns an empty BatchMeta at once if there are not enough samples. false: it waits for them, "
        "at most TQ_CONTROLLER_GET_METADATA_TIMEOUT seconds.",
    )
    max_deliveries: int = setting(
        "controller.max_deliveries",
        16,
        WholeNumber(0),
        "After how many leases without an ack a task skips a sample, with the reason `poison`. A partition may have "
        "another number. 0: never.",
    )
    durability_values: str = setting(
        "durability.values",
        "none",
        Choice("none", "processes", "machine"),
        "Which failures the values survive. none: the death of single servers; values in memory end with the system. "
        "processes: the death of all processes at once. The memory of the values belongs to `durability.folder`, and "
        "the next system with this folder continues with it; `tq stop --discard` removes it. machine: also the failure "
        "of the machine, because every value is also written to `durability.folder`, which should be on an SSD. Under "
        "Ray it is on storage that all nodes see, and also has the values of nodes that die. Both need SimpleStorage, "
        "and `processes` needs `runtime: local`.",
    )
    durability_folder: str | None = setting(
        "durability.folder",
        None,
        OrNull(AbsolutePath()),
        "The folder that keeps the system: its journal, and with `durability.values` also the record of its values. It "
        "remains when the system ends, and a later system with the same folder continues where this one ended. Under "
        "Ray, on storage that all nodes see, another node continues with it if the controller's node dies. null: "
        "the journal is in a folder that is removed with the system.",
    )
    durability_mode: str = setting(
        "durability.mode",
        "async",
        Choice("none", "async", "sync"),
        "When a request that changes something is answered. async: when the change was handed to the operating system, "
        "so that it survives the death of any process. sync: when it is also on the disk, so that it survives the "
        "failure of the machine; with `values: machine` this includes the values of a put. none: there is no journal, "
        "and the system ends if the controller dies.",
    )
    max_lag_bytes: int = setting(
        "durability.max_lag.bytes",
        1 << 30,
        WholeNumber(0, unit="bytes"),
        "With `values: machine` and `mode: async`: the values of acknowledged puts that are not on the disk yet are at "
        "most so many bytes. Further puts wait.",
    )
    max_lag_seconds: float = setting(
        "durability.max_lag.seconds",
        10.0,
        Seconds(),
        "The same as an age: a put is acknowledged only while no value waits longer for the disk.",
    )
    storage_backend: str = setting(
        "backend.storage_backend",
        "SimpleStorage",
        _BACKEND,
        "Where values are stored. RayStore needs `runtime: ray`. A store of your own has an import path "
        '"package.module:Class" (docs/backends.md).',
    )
    field_backends: dict[str, str] = setting(
        "backend.fields",
        {},
        FieldBackends(_BACKEND),
        "The fields whose values are stored in another backend, for example {pixel_values: MooncakeStore, "
        '"logprobs*": SimpleStorage}. A key is the name of a field or a pattern with `*`, `?` and `[...]`; the first '
        "one that fits decides. A pattern that fits a nested TensorDict fits the fields in it. Fields that none fits "
        "are stored in `storage_backend`.",
    )
    store_options: dict[str, dict[str, Any]] = setting(
        OPTIONS,
        {},
        PlainMapping(),
        "The arguments with which the class of a store of your own is called, by name. A system has at most one store "
        "of your own.",
    )
    total_storage_size: int | None = setting(
        "backend.SimpleStorage.total_storage_size",
        None,
        OrNull(WholeNumber(1, unit="rows")),
        "The largest number of rows in all units together. null: there is no limit.",
    )
    num_data_storage_units: int | None = setting(
        "backend.SimpleStorage.num_data_storage_units",
        None,
        OrNull(WholeNumber(1)),
        "The number of processes that hold values. They are spread evenly over the nodes that exist when the system "
        "starts. null: one on each node, also on nodes that are added later.",
    )
    replicas: int = setting(
        "backend.SimpleStorage.replicas",
        1,
        WholeNumber(1, 2),
        "The number of units that hold each value. With 2, no value is lost if one unit is lost.",
    )
    arena_bytes: int | None = setting(
        "backend.SimpleStorage.arena_bytes",
        None,
        OrNull(WholeNumber(SMALLEST_STORAGE, unit="bytes")),
        "The size to which the arena of one unit may grow. null: the size of its file system.",
    )
    arena_folder: str | None = setting(
        "backend.SimpleStorage.arena_folder",
        None,
        OrNull(AbsolutePath()),
        "The folder of the arenas, which should be in memory. null: shared memory if it has space, otherwise the disk.",
    )
    offload_enabled: ClassVar[Setting] = Setting(
        "backend.SimpleStorage.offload.enabled",
        False,
        Boolean(),
        "Whether there is a disk tier.",
    )
    offload_path: str | None = setting(
        "backend.SimpleStorage.offload.path",
        None,
        OrNull(AbsolutePath()),
        "A folder on an SSD, which must exist. Each system creates a private folder in it and removes this folder when "
        "it ends. The next start removes the folders of systems that were killed.",
    )
    offload_high: float = setting(
        "backend.SimpleStorage.offload.high_watermark",
        0.8,
        Fraction(),
        "The share of a unit's bytes in use above which blocks move to the disk.",
    )
    offload_low: float = setting(
        "backend.SimpleStorage.offload.low_watermark",
        0.6,
        Fraction(),
        "The share of a unit's bytes in use at which blocks stop moving. It must be less than `high_watermark`.",
    )
    offload_bytes: int | None = setting(
        "backend.SimpleStorage.offload.capacity",
        None,
        OrNull(WholeNumber(SMALLEST_STORAGE, unit="bytes")),
        "The size to which the disk tier may grow. With `replicas: 2` there are two units on disk, and each may grow "
        "to this size. null: the size of its file system.",
    )
    dedup_fields: list[str] = setting(
        "dedup.fields",
        [],
        Patterns(),
        "The fields whose equal values are stored once in each partition, found by a hash of their bytes, for example "
        '[pixel_values, "image_*"]. Only values of 4 KiB or more are hashed. A put of such a field takes one more '
        "request. Without this, values are stored once if rows of one put share memory.",
    )
    metrics_enabled: bool = setting(
        "metrics.enabled",
        False,
        Boolean(),
        "Whether one HTTP endpoint serves the metrics of the controller and of all units.",
    )
    metrics_port: int = setting("metrics.port", 0, WholeNumber(0, 65535), "The port of the metrics. 0: a free port.")
    metrics_host: str = setting(
        "metrics.host",
        "127.0.0.1",
        Text(),
        "The address on which the metrics are served. With 0.0.0.0, everyone who can reach this machine can read them, "
        "including the names of partitions, fields and tasks.",
    )
    metrics_compatible_names: bool = setting(
        "metrics.compatible_names",
        False,
        Boolean(),
        "Whether the endpoint also serves the metrics that existing dashboards for this interface query, under the "
        "names that they query, for example `tq_partition_production_progress`.",
    )
    live_enabled: bool = setting(
        "live.enabled",
        False,
        Boolean(),
        "Whether a page that shows the system in a browser is served while the system runs, by a process of its own. "
        "`tq status` prints its address. Needs the extra [live]. `tq live` serves the same page of any system.",
    )
    live_host: str = setting(
        "live.host",
        "127.0.0.1",
        Text(),
        "The address on which the page is served. If other machines can reach it, the page is served with the files of "
        "`security.tls`, or `live.insecure` must be true.",
    )
    live_port: int = setting("live.port", 0, WholeNumber(0, 65535), "The port of the page. 0: a free port.")
    live_values: bool = setting(
        "live.values",
        False,
        Boolean(),
        "Whether the page shows values of samples and tags: the first 16 values and 2,000 characters. false: only "
        "names, types and shapes.",
    )
    live_tokenizer: str | None = setting(
        "live.tokenizer",
        None,
        OrNull(Text()),
        "The tokenizer with which the page shows token ids as text, if it shows values. The absolute path of a "
        "`tokenizer.json` or of a folder that has one, or the name of a model in the cache of Hugging Face. Nothing is "
        "downloaded. Needs the extra [tokenizer]. null: token ids are shown as numbers.",
    )
    live_insecure: bool = setting(
        "live.insecure",
        False,
        Boolean(),
        "Whether the page may be served without TLS to other machines, so that everyone in the network can read it.",
    )
    timeline_events: int = setting(
        "timeline.events",
        262_144,
        WholeNumber(0, 1 << 26, unit="events"),
        "How many events of the timeline the controller keeps: puts, claims and waits, for `tq top` and others. Each "
        "takes 120 bytes of memory when it occurs, with the samples that it is about. 0: none.",
    )
    allow_pickle: bool = setting(
        "security.allow_pickle",
        True,
        Boolean(),
        "Whether values may be pickled Python objects. false: clients and servers refuse objects that neither msgpack "
        "nor numpy nor torch can encode.",
    )
    tls: dict[str, str] | None = setting(
        "security.tls",
        None,
        OrNull(TlsFiles()),
        "TLS of the TCP connections between nodes. The absolute paths of three PEM files, the same on all nodes: "
        "{certificate: /..., private_key: /..., authority: /...}. Each process shows its certificate, which the "
        "authority must have signed; the name in it does not matter. The private key has no password. The key of the "
        "system is needed in addition. null: no TLS, so that samples cross the network unencrypted. Processes of one "
        "node use UNIX sockets, without TLS.",
    )
    copy_threads: int | None = setting(
        "client.copy_threads",
        None,
        OrNull(WholeNumber(1, 256, unit="threads")),
        "How many threads of a client share a large copy (from 8 MiB), with at least 4 MiB for each. null: as many as "
        "the process has cores, by its affinity and its cgroups, divided by the ranks of its node (LOCAL_WORLD_SIZE "
        "and the like); at least 2 if it has 2 cores, at most 16. The threads are started for each copy.",
    )
    start_timeout: float = setting(
        "timeouts.start", 30, Seconds(), "How long `init` waits until the servers are ready."
    )
    sampler_timeout: float = setting(
        "timeouts.sampler",
        30,
        Seconds(),
        "How long one call of a user's sampler may take. If it takes longer, its process is ended, and the next call "
        "starts a new one.",
    )
    call_timeout: float = setting(
        "timeouts.call",
        60,
        Seconds(),
        "How long a call waits for its answer, in addition to the time that the caller allows it to wait for samples.",
    )
    restart_timeout: float = setting(
        "timeouts.restart",
        60,
        Seconds(),
        "How long the system tries to restart a server that ends before or soon after it is ready. A server is the "
        "controller or a storage unit on any node. After this time the system ends; the server's log has the reason.",
    )
    report_wait: float | None = setting(
        "timeouts.report_wait",
        30,
        OrNull(Seconds()),
        "After how long a call or a loader that waits (for samples, space, a lock, changes) logs what it waits for, "
        "and why. It logs it again each time the wait has doubled. null: never.",
    )

    @classmethod
    def from_config(cls, conf: DictConfig | Mapping[str, Any] | None = None) -> Settings:
        """Return the settings of a conf that is merged over the defaults.

        Whether the sampler exists is checked by `transfer_queue.sampler.factory.sampler_objects`.

        Args:
            conf: What the caller gave. Default: nothing, which results in the defaults.

        Raises:
            InvalidArgumentError: A value is not allowed; the message has its key and what is allowed.
        """
        merged = merge(conf)
        values = {
            name: each.validator.convert(each.key, select(merged, each.key))
            for name, each in declared_settings(cls).items()
            if each.key != OPTIONS  # checked with the sections of the other stores, of which only one is in use
        }
        offload_enabled = values.pop("offload_enabled")
        backends = dict.fromkeys((values["storage_backend"], *values["field_backends"].values()))
        values["store_options"] = {name: validated_store_options(merged, name) for name in backends if name != SIMPLE}
        own = [name for name in backends if ":" in name]
        if len(own) > 1:
            raise not_allowed(KEYS["field_backends"], own, f"one store of your own, because {OPTIONS} are its options")
        _check_sampler_arguments(select(merged, KEYS["sampler"]), values["sampler_args"])
        if values["offload_low"] >= values["offload_high"]:
            allowed = f"less than {KEYS['offload_high']}, which is {values['offload_high']}"
            raise not_allowed(KEYS["offload_low"], values["offload_low"], allowed)
        exposed = values["live_enabled"] and not is_loopback(values["live_host"])
        if exposed and values["tls"] is None and not values["live_insecure"]:
            allowed = f"an address of this machine only, unless {KEYS['tls']} or {KEYS['live_insecure']} is set"
            raise not_allowed(KEYS["live_host"], values["live_host"], allowed)
        if values["live_enabled"] and values["live_tokenizer"] is not None and not values["live_values"]:
            allowed = f"null, unless {KEYS['live_values']} is true: text is a value"
            raise not_allowed(KEYS["live_tokenizer"], values["live_tokenizer"], allowed)
        if SIMPLE not in backends:
            values["num_data_storage_units"] = 1  # it knows the contents of the store, wherever the bytes are
            offload_enabled = False
        elif offload_enabled and values["offload_path"] is None:
            allowed = f"an absolute path on an SSD, because {cls.offload_enabled.key} is true"
            raise not_allowed(KEYS["offload_path"], None, allowed)
        if not offload_enabled:
            values["offload_path"] = None
        _check_durability(values)
        settings = cls(**values)
        settings._check_replicas(settings.num_data_storage_units)
        return settings

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Return the settings of `to_json`. Entries that only a newer release has are ignored."""
        return cls(**{each.name: values[each.name] for each in fields(cls)})

    @property
    def samplers(self) -> dict[str, TaskSampler]:
        """`SYSTEM` or the pattern of tasks -> (name of the sampler, arguments), in the order of the configuration."""
        return {SYSTEM: (self.sampler, self.sampler_args), **self.task_samplers}

    @property
    def backends(self) -> list[str]:
        """The backends of the system, the one of most fields first."""
        return list(dict.fromkeys((self.storage_backend, *self.field_backends.values())))

    @property
    def stores(self) -> list[str]:
        """Those of the backends that are external stores."""
        return [name for name in self.backends if name != SIMPLE]

    @property
    def has_arenas(self) -> bool:
        """Whether SimpleStorage is one of the backends."""
        return SIMPLE in self.backends

    def deduplicates(self, field: str) -> bool:
        """Return whether equal values of this field are found by a hash (`dedup.fields`)."""
        return any(fnmatchcase(field, pattern) for pattern in self.dedup_fields)

    def refuse_one_node(self) -> None:
        """Raise InvalidArgumentError if these settings need more than one node."""
        self._check_replicas(self.num_data_storage_units or 1)

    def check_runtime(self, under_ray: bool) -> None:
        """Raise StartError if the backend or the durability of values needs another runtime."""
        if "RayStore" in self.backends and not under_ray:
            raise StartError(
                "the backend RayStore keeps values in Ray's object store and needs runtime: ray; call ray.init() "
                "before tq.init(), or choose SimpleStorage"
            )
        if self.durability_values == "processes" and under_ray:
            raise StartError(
                f"{KEYS['durability_values']} is processes, which keeps the memory of one machine and needs runtime: "
                f"local; set {KEYS['durability_values']} to machine, which keeps every value in "
                f"{KEYS['durability_folder']} on storage that all nodes see, or to none and use {KEYS['replicas']}: 2"
            )

    @property
    def controller_moves(self) -> bool:
        """Whether another node may take over the controller under Ray, if it sees the folder of the journal.

        An external store has processes on the controller's node, which end with it.
        """
        return self.durability_folder is not None and self.durability_mode != "none" and not self.stores

    @property
    def max_lag(self) -> tuple[int, float] | None:
        """How far the disk may be behind acknowledged puts, in bytes and seconds; None without a mirror.

        (-1, 0.0): every put waits until the disk has its values.
        """
        if self.durability_values != "machine":
            return None
        return (-1, 0.0) if self.durability_mode == "sync" else (self.max_lag_bytes, self.max_lag_seconds)

    def _check_replicas(self, units: int | None) -> None:
        """Raise InvalidArgumentError if there are fewer units than replicas. None: the number is not known yet."""
        if not self.has_arenas and self.replicas > 1:
            raise not_allowed(
                KEYS["replicas"], self.replicas, f"1 with {KEYS['storage_backend']} {self.storage_backend}"
            )
        if units is not None and self.replicas > units:
            key = KEYS["num_data_storage_units"]
            raise not_allowed(
                KEYS["replicas"], self.replicas, f"1, or {key} of {self.replicas} or more ({key} is {units})"
            )


def _check_durability(values: Mapping[str, Any]) -> None:
    """Raise InvalidArgumentError if `durability.values` needs something that the other settings exclude."""
    level = values["durability_values"]
    if level == "none":
        return
    if values["durability_folder"] is None:
        allowed = f"an absolute path, because {KEYS['durability_values']} is {level}"
        raise not_allowed(KEYS["durability_folder"], None, allowed)
    if values["durability_mode"] == "none":
        allowed = f"async or sync, because {KEYS['durability_values']} is {level}"
        raise not_allowed(KEYS["durability_mode"], "none", allowed)
    for backend in (values["storage_backend"], *values["field_backends"].values()):
        if backend != SIMPLE:
            allowed = f"none with the backend {backend}, which keeps the values itself"
            raise not_allowed(KEYS["durability_values"], level, allowed)
    if level == "machine" and values["replicas"] > 1:
        allowed = f"1 with {KEYS['durability_values']} machine, whose disk has the second copy of each value"
        raise not_allowed(KEYS["replicas"], values["replicas"], allowed)


def _check_sampler_arguments(sampler: object, arguments: dict[str, Any]) -> None:
    if arguments and not isinstance(sampler, (str, type)):
        allowed = f"nothing if {KEYS['sampler']} is an instance, which has its own"
        raise not_allowed(KEYS["sampler_args"], arguments, allowed)


SETTINGS: tuple[Setting, ...] = tuple(
    each for kind in (Settings, *STORE_OPTIONS.values()) for each in declared_settings(kind).values()
)
"""All settings, in the order of `config.yaml`, apart from the sections of stores, which end the section `backend`."""

KEYS: dict[str, str] = {each.name: declared_settings(Settings)[each.name].key for each in fields(Settings)}
"""The key of each field of `Settings`."""
