"""The settings: each is declared here once, with its key, its default, what is allowed, and what it means.

`config.yaml`, `tq start --help` and the page `docs/reference/configuration.md` are made of these declarations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from msgspec import Meta

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
    FieldBackends,
    Fraction,
    NonEmptyText,
    Patterns,
    PlainMapping,
    Port,
    SamplerReference,
    Seconds,
    SystemName,
    TaskSampler,
    TaskSamplers,
    TlsFiles,
    is_loopback,
    not_allowed,
    validator_of,
)
from transfer_queue.errors import StartError

if TYPE_CHECKING:
    from omegaconf import DictConfig

SYSTEM = ""
"""What `Settings.samplers` has for `controller.sampler`, in place of the name of a task."""

Backend: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"\A(?:{'|'.join((SIMPLE, *STORE_OPTIONS))})\Z|:",
        description=", ".join((SIMPLE, *STORE_OPTIONS, 'an import path "package.module:Class"')),
    ),
]
"""The name of a backend."""


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
        "Whether an unknown key is an error, also in the `sampling_config` of a fetch. false: it is kept, and a "
        "warning names the nearest known key. In `tq start` it is always an error.",
    )
    name: SystemName | None = setting(
        "system.name",
        None,
        "The name of the system that `init` starts or attaches to. null: the value of TQ_SYSTEM, or one name for each "
        "user.",
    )
    runtime: Literal["auto", "local", "ray"] = setting(
        "runtime",
        "auto",
        "What runs the servers. local: processes of this machine. ray: a Ray actor starts them. auto: ray if this "
        "process has called `ray.init()` or RAY_ADDRESS is set, otherwise local.",
    )
    ray_namespace: NonEmptyText = setting(
        "ray.namespace",
        "transfer_queue",
        "The namespace of the controller's actor. The actor is called TransferQueueController, followed by "
        "`-<system.name>` if the system has a name.",
    )
    ray_detached: bool = setting(
        "ray.detached",
        False,
        "Whether the system continues until `tq stop` when the driver that started it ends.",
    )
    ray_restart_seconds: Seconds = setting(
        "ray.restart_seconds",
        60,
        "How long the servers wait for Ray to restart their actor after it died. Then they end.",
    )
    ray_node_resource: NonEmptyText | None = setting(
        "ray.node_resource",
        None,
        "A resource of Ray: only nodes that have it get storage units. null: all nodes get them.",
    )
    ray_actor_options: Annotated[
        dict[str, Any],
        PlainMapping(
            reserved=("name", "namespace", "lifetime", "get_if_exists"),
            instead="set system.name, ray.namespace and ray.detached instead",
        ),
    ] = setting(
        "ray.actor_options",
        {},
        "Options of the controller's actor, as `ray.remote` takes them, for example {runtime_env: {...}, "
        "max_restarts: 3}. By default the actor reserves no CPU, and Ray restarts it each time it dies.",
    )
    sampler: Annotated[str | None, SamplerReference()] = setting(
        "controller.sampler",
        "SequentialSampler",
        "The sampler that decides which of the ready samples a fetch gets.",
    )
    sampler_args: Annotated[
        dict[str, Any],
        PlainMapping(
            content="the arguments of controller.sampler",
            instead="pass an instance as controller.sampler",
            null_is_empty=True,
        ),
    ] = setting(
        "controller.sampler_args",
        None,
        "The arguments of the sampler's class by name, for example {token_budget: 16384, dp_size: 4}. The `inner` of "
        "a PrioritySampler or FreshnessSampler is a name, or a mapping with its own `sampler` and `sampler_args`. "
        "null: no arguments.",
    )
    task_samplers: Annotated[dict[str, TaskSampler], TaskSamplers()] = setting(
        "controller.task_samplers",
        {},
        "The samplers of tasks that do not use `controller.sampler`, for example {reward: SequentialSampler, "
        '"train*": {sampler: SeqlenBalancedSampler, sampler_args: {dp_size: 2}}}. A key is the name of a task or a '
        "pattern; the name counts first, then the first pattern that fits.",
    )
    sampler_isolation: Literal["process", "inline"] = setting(
        "controller.sampler_isolation",
        "process",
        "Where a sampler runs that is not built in. process: in a separate process, so that it delays only the "
        "fetches that use it. inline: in the controller, which answers no other request while `sample` runs; a small "
        "fetch takes less time there.",
    )
    polling_mode: bool = setting(
        "controller.polling_mode",
        False,
        "Whether a fetch returns an empty BatchMeta at once if there are not enough samples. false: it waits, at most "
        "TQ_CONTROLLER_GET_METADATA_TIMEOUT seconds.",
    )
    max_deliveries: Annotated[int, Meta(ge=0)] = setting(
        "controller.max_deliveries",
        16,
        "After how many leases without an ack a task skips a sample, with the reason `poison`. A partition may have "
        "another number. 0: never.",
    )
    durability_values: Literal["none", "processes", "machine"] = setting(
        "durability.values",
        "none",
        "Which failures the values survive. none: the death of single servers. processes: the death of all processes "
        "at once; the memory of the values belongs to `durability.folder`, and `tq stop --discard` removes it. "
        "machine: also the failure of the machine; every value is also written to `durability.folder`, on an SSD, and "
        "under Ray on storage that all nodes see. Both need SimpleStorage, and `processes` needs `runtime: local`.",
    )
    durability_folder: Annotated[str, AbsolutePath()] | None = setting(
        "durability.folder",
        None,
        "The folder of the journal, and of the record of the values. It remains when the system ends, and the next "
        "system with it continues there. Under Ray, another node continues if the controller's node dies and all "
        "nodes see the folder. null: the journal is removed with the system.",
    )
    durability_mode: Literal["none", "async", "sync"] = setting(
        "durability.mode",
        "async",
        "When a request that changes something is answered. async: when the operating system has the change, so that "
        "it survives the death of any process. sync: when it is on the disk, with `values: machine` including the "
        "values of a put. none: there is no journal, and the system ends if the controller dies.",
    )
    max_lag_bytes: Annotated[int, Meta(ge=0, extra={"unit": "bytes"})] = setting(
        "durability.max_lag.bytes",
        1 << 30,
        "With `values: machine` and `mode: async`: how much of the values of acknowledged puts may be missing on the "
        "disk. Further puts wait.",
    )
    max_lag_seconds: Seconds = setting(
        "durability.max_lag.seconds",
        10.0,
        "The same as an age: puts wait while a value has waited longer for the disk.",
    )
    storage_backend: Backend = setting(
        "backend.storage_backend",
        "SimpleStorage",
        "Where values are stored. RayStore needs `runtime: ray`. A store of your own is an import path "
        "(docs/backends.md).",
    )
    field_backends: Annotated[dict[str, str], FieldBackends(validator_of(Backend))] = setting(
        "backend.fields",
        {},
        "The fields whose values are stored in another backend, by name or pattern; the first one that fits decides. "
        'For example {pixel_values: MooncakeStore, "logprobs*": SimpleStorage}. A pattern that fits a nested '
        "TensorDict fits the fields in it.",
    )
    store_options: Annotated[dict[str, dict[str, Any]], PlainMapping()] = setting(
        OPTIONS,
        {},
        "The arguments of the class of a store of your own, by name. A system has at most one such store.",
    )
    total_storage_size: Annotated[int, Meta(ge=1, extra={"unit": "rows"})] | None = setting(
        "backend.SimpleStorage.total_storage_size",
        None,
        "The largest number of rows in all units together. null: there is no limit.",
    )
    num_data_storage_units: Annotated[int, Meta(ge=1)] | None = setting(
        "backend.SimpleStorage.num_data_storage_units",
        None,
        "The number of processes that hold values, spread evenly over the nodes that exist at the start. null: one on "
        "each node, also on nodes that are added later.",
    )
    replicas: Annotated[int, Meta(ge=1, le=2)] = setting(
        "backend.SimpleStorage.replicas",
        1,
        "The number of units that hold each value. With 2, no value is lost if one unit is lost.",
    )
    arena_bytes: Annotated[int, Meta(ge=SMALLEST_STORAGE, extra={"unit": "bytes"})] | None = setting(
        "backend.SimpleStorage.arena_bytes",
        None,
        "The size to which the arena of one unit may grow. null: the size of its file system.",
    )
    arena_folder: Annotated[str, AbsolutePath()] | None = setting(
        "backend.SimpleStorage.arena_folder",
        None,
        "The folder of the arenas, which should be in memory. null: shared memory if it has space, otherwise the disk.",
    )
    offload_enabled: ClassVar[Setting] = Setting(
        "backend.SimpleStorage.offload.enabled",
        False,
        validator_of(bool),
        "Whether there is a disk tier.",
    )
    offload_path: Annotated[str, AbsolutePath()] | None = setting(
        "backend.SimpleStorage.offload.path",
        None,
        "An existing folder on an SSD. Each system has a private folder in it, which is removed with the system.",
    )
    offload_high: Fraction = setting(
        "backend.SimpleStorage.offload.high_watermark",
        0.8,
        "The share of a unit's bytes in use above which blocks move to the disk.",
    )
    offload_low: Fraction = setting(
        "backend.SimpleStorage.offload.low_watermark",
        0.6,
        "The share at which blocks stop moving, less than `high_watermark`.",
    )
    offload_bytes: Annotated[int, Meta(ge=SMALLEST_STORAGE, extra={"unit": "bytes"})] | None = setting(
        "backend.SimpleStorage.offload.capacity",
        None,
        "The size to which each unit on disk may grow; with `replicas: 2` there are two. null: the size of its file "
        "system.",
    )
    dedup_fields: Annotated[list[str], Patterns()] = setting(
        "dedup.fields",
        [],
        "The fields whose equal values of 4 KiB or more are stored once in each partition, for example [pixel_values, "
        '"image_*"]. A put of such a field takes one more request. Other fields share a value only if rows of one put '
        "share memory.",
    )
    metrics_enabled: bool = setting(
        "metrics.enabled",
        False,
        "Whether one HTTP endpoint serves the metrics of the controller and of all units.",
    )
    metrics_port: Port = setting("metrics.port", 0, "The port of the metrics. 0: a free port.")
    metrics_host: NonEmptyText = setting(
        "metrics.host",
        "127.0.0.1",
        "The address on which the metrics are served. With 0.0.0.0, everyone who can reach this machine can read them.",
    )
    metrics_compatible_names: bool = setting(
        "metrics.compatible_names",
        False,
        "Whether the endpoint also serves the names that existing dashboards for this interface query, for example "
        "`tq_partition_production_progress`.",
    )
    live_enabled: bool = setting(
        "live.enabled",
        False,
        "Whether the live page is served while the system runs. `tq status` prints its address. Needs the extra "
        "[live].",
    )
    live_host: NonEmptyText = setting(
        "live.host",
        "127.0.0.1",
        "The address on which the page is served. If other machines can reach it, it needs `security.tls` or "
        "`live.insecure`.",
    )
    live_port: Port = setting("live.port", 0, "The port of the page. 0: a free port.")
    live_values: bool = setting(
        "live.values",
        False,
        "Whether the page shows values of samples and tags: the first 16 values and 2,000 characters.",
    )
    live_tokenizer: NonEmptyText | None = setting(
        "live.tokenizer",
        None,
        "The tokenizer that shows token ids as text, if `live.values` is true: the absolute path of a "
        "`tokenizer.json` or of its folder, or the name of a model in the cache of Hugging Face. Nothing is "
        "downloaded. Needs the extra [tokenizer]. null: token ids are numbers.",
    )
    live_insecure: bool = setting(
        "live.insecure",
        False,
        "Whether the page may be served without TLS to other machines, so that everyone in the network can read it.",
    )
    timeline_events: Annotated[int, Meta(ge=0, le=1 << 26, extra={"unit": "events"})] = setting(
        "timeline.events",
        262_144,
        "How many puts, claims and waits the controller remembers, for `tq top` and others. Each takes 120 bytes. 0: "
        "none.",
    )
    allow_pickle: bool = setting(
        "security.allow_pickle",
        True,
        "Whether values may be pickled Python objects. false: only what msgpack, numpy or torch can encode.",
    )
    tls: Annotated[dict[str, str], TlsFiles()] | None = setting(
        "security.tls",
        None,
        "TLS between nodes: the absolute paths of three PEM files, {certificate: /..., private_key: /..., authority: "
        "/...}. The authority must have signed the certificate, whose name does not matter. The private key has no "
        "password. null: samples cross the network unencrypted.",
    )
    copy_threads: Annotated[int, Meta(ge=1, le=256, extra={"unit": "threads"})] | None = setting(
        "client.copy_threads",
        None,
        "How many threads of a client share a copy from 8 MiB. null: as many as the process has cores, divided by the "
        "ranks of its node, at most 16.",
    )
    start_timeout: Seconds = setting("timeouts.start", 30, "How long `init` waits until the servers are ready.")
    sampler_timeout: Seconds = setting(
        "timeouts.sampler",
        30,
        "How long one call of a user's sampler may take. Then its process is ended, and the next call starts a new "
        "one.",
    )
    call_timeout: Seconds = setting(
        "timeouts.call",
        60,
        "How long a call waits for its answer, in addition to its own timeout.",
    )
    restart_timeout: Seconds = setting(
        "timeouts.restart",
        60,
        "How long the system tries to restart a server that does not become ready. Then the system ends; the server's "
        "log has the reason.",
    )
    report_wait: Seconds | None = setting(
        "timeouts.report_wait",
        30,
        "After how long a call or a loader that waits logs what it waits for, and why; again each time the wait has "
        "doubled. null: never.",
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
            for name, each in declared_settings(Settings).items()
            if each.key != OPTIONS  # checked with the sections of the other stores, of which only one is in use
        }
        offload_enabled = values.pop("offload_enabled")
        backends = dict.fromkeys((values["storage_backend"], *values["field_backends"].values()))
        values["store_options"] = {name: validated_store_options(merged, name) for name in backends if name != SIMPLE}
        own = [name for name in backends if ":" in name]
        if len(own) > 1:
            raise not_allowed(KEYS["field_backends"], own, f"one store of your own, because {OPTIONS} are its options")
        if values["sampler_args"] and not isinstance(select(merged, KEYS["sampler"]), (str, type)):
            allowed = f"nothing if {KEYS['sampler']} is an instance, which has its own"
            raise not_allowed(KEYS["sampler_args"], values["sampler_args"], allowed)
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


SETTINGS: tuple[Setting, ...] = tuple(
    each for kind in (Settings, *STORE_OPTIONS.values()) for each in declared_settings(kind).values()
)
"""All settings, in the order of `config.yaml`, apart from the sections of stores, which end the section `backend`."""

KEYS: dict[str, str] = {each.name: declared_settings(Settings)[each.name].key for each in fields(Settings)}
"""The key of each field of `Settings`."""
