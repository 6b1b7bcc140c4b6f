"""What an operator may set, in groups: one frozen dataclass each, a docstring under every field.

Times are seconds, sizes bytes, names say so. Defaults suit one machine with a small model.
Limits: settings are fixed for the life of a process; what belongs to one function is in its spec, not here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HttpSettings:
    host: str = "127.0.0.1"
    """Address to listen on. Loopback by default: the admin key travels in clear text without a proxy."""
    port: int = 8080
    """TCP port; 0 takes a free one and writes it to `control.json`."""
    body_bytes: int = 16 * 1024 * 1024
    """Cap of a request body. Larger ones get 413 before they are parsed. Too small refuses long chats; too large lets
    one client hold that much memory per connection."""
    heartbeat_s: float = 10.0
    """Silence after which a waiting stream gets an SSE comment. Proxies cut idle connections after 15 s or more; below
    1 s it is only noise."""
    reader_buffer_bytes: int = 4 * 1024 * 1024
    """Bytes a slow reader may lag before its connection is closed; it can come back with its cursor."""
    shutdown_drain_s: float = 20.0
    """How long a first SIGTERM lets running requests finish before they are parked in the journal."""


@dataclass(frozen=True, slots=True)
class QueueSettings:
    max_requests: int = 1000
    """Requests that may wait per function. More get 429 `saturated`. 0 refuses whatever cannot run at once."""
    max_bytes: int = 64 * 1024 * 1024
    """Bytes of prompts and parameters that may wait per function: the bound that holds when requests are large."""
    wait_estimate_s: float = 5.0
    """`Retry-After` of `model_loading` before any start was measured. Clients give up above 120."""


@dataclass(frozen=True, slots=True)
class DatabaseSettings:
    url: str = ""
    """`sqlite:///PATH` or `postgresql://USER@HOST:PORT/NAME`; empty: `stoker.db` in the data directory. Gateways on
    several machines need PostgreSQL. A password belongs into PGPASSWORD or a passfile, not here."""
    busy_timeout_s: float = 5.0
    """How long a write waits for another process's lock (a backup, a shell) before it counts as unavailable."""
    cache_bytes: int = 4 * 1024 * 1024
    """SQLite page cache of the writer; readers have a quarter each. Larger buys nothing at this write pattern."""
    group_jobs: int = 512
    """Most writes in one commit. It only bounds the latency of a burst: groups form by themselves under load."""
    checkpoint_jobs: int = 1000
    """Writes after which the write-ahead log is folded back, beside the writer. Larger makes recovery slower."""
    wal_bytes: int = 64 * 1024 * 1024
    """Size of the write-ahead log at which the writer itself waits for it to be folded back."""
    reader_threads: int = 2
    """Threads for reads; they never block the writer. On PostgreSQL each holds a connection."""
    process_commit: str = "local"
    """PostgreSQL's `synchronous_commit` for durability `process`. `local`: on the server's disk, no standby awaited.
    `off` is quicker and loses the last 0.6 s when the server itself is killed. Durability `host` is always `on`."""
    connect_timeout_s: float = 3.0
    """How long a connection to PostgreSQL may take; a writer waits no longer to learn that the server is away."""
    statement_timeout_s: float = 10.0
    """A PostgreSQL that has not answered a statement for this long counts as gone. Shorter than a stall of its disk,
    and a busy server is taken for a dead one."""
    idle_transaction_s: float = 5.0
    """When PostgreSQL ends a session that stands still inside a transaction, so that a stopped gateway holds no locks
    against its heir. Must be shorter than a gateway's lease."""
    patience_s: float = 60.0
    """How long running streams pause, with heartbeats, for a database that is away. Then their readers get an error
    that says how to come back; the requests are kept, and go on when the database does."""
    unclear_s: float = 5.0
    """How long the writer tries to learn what became of a commit that PostgreSQL did not answer."""


@dataclass(frozen=True, slots=True)
class RetentionSettings:
    log_s: float = 3600.0
    """How long the token log and the input of an ended request are kept for readers that come back. 0 drops them at
    the next sweep: a reader that lost its connection at the very end cannot get the rest any more."""
    request_s: float = 30 * 86400.0
    """How long the row of an ended request (times, usage, outcome, idempotency key) is kept. The ledger stays."""
    decision_s: float = 7 * 86400.0
    """How long decisions are kept for `stoker why`."""
    partition_s: float = 3600.0
    """On PostgreSQL: how much time one partition of the token log spans. It is dropped as a whole, when nothing in it
    is kept any more: shorter frees space sooner, and makes more tables."""
    sweep_s: float = 60.0
    """Pause between sweeps; each deletes in small batches so that it is never in the way of a token."""


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    lease_s: float = 15.0
    """A gateway that has not renewed its lease for this long is dead and its requests are adopted by another. Shorter
    adopts sooner, but a stall of the machine then looks like a death."""
    lead_cap_s: float = 3.0
    """The leader's lease of its lead, where `lease_s` is not shorter still: a leader that is gone wakes nothing at zero
    until another leads, a third later at most. Shorter takes every stall of a busy machine for a death; one that only
    stalled loses nothing but the lead."""
    shared: bool = False
    """Other gateways work on the same database. Otherwise the lock of the data directory says that this one is alone:
    it adopts at its start what it finds unfinished, and holds no lease."""
    url: str = ""
    """Where other gateways reach this one; empty: where it listens."""

    @property
    def lead_s(self) -> float:
        """Lease of the lead."""
        return min(self.lease_s, self.lead_cap_s)

    @property
    def renew_s(self) -> float:
        """Pause between renewals; a third of the shorter lease, so that two may be missed."""
        return self.lead_s / 3

    @property
    def lead_within_s(self) -> float:
        """A leader's death is seen and another leads after this long."""
        return self.lead_s + self.renew_s

    @property
    def refresh_s(self) -> float:
        """Pause between looks at what other gateways changed, for news that did not arrive."""
        return self.lease_s / 3

    @property
    def adopt_within_s(self) -> float:
        """A gateway that dies renewed just before at the latest, which others see a renewal later at most; a lease
        from then on they adopt."""
        return self.lease_s + self.renew_s


@dataclass(frozen=True, slots=True)
class SlotRange:
    """`N`, or `MIN..MAX`: as many as are needed between the two."""

    least: int = 1
    most: int = 1

    @classmethod
    def parse(cls, text: str) -> SlotRange:
        """Raises ValueError."""
        least, dots, most = text.partition("..")
        try:
            found = cls(int(least), int(most if dots else least))
        except ValueError:
            raise ValueError(f"{text!r} is neither a number nor MIN..MAX") from None
        if not 0 <= found.least <= found.most <= MOST_SLOTS:
            raise ValueError(f"{text}: MIN and MAX are numbers from 0 to {MOST_SLOTS}, MIN not above MAX")
        return found


@dataclass(frozen=True, slots=True)
class AgentPlace:
    """Where the agent of a slot on another machine listens."""

    slot_id: str
    host: str
    port: int

    @classmethod
    def parse_list(cls, text: str) -> tuple[AgentPlace, ...]:
        """`NAME=HOST:PORT,...`. Raises ValueError."""
        found = []
        for part in filter(None, (each.strip() for each in text.split(","))):
            name, equals, address = part.partition("=")
            host, colon, port = address.rpartition(":")
            if not (equals and colon and host and port.isascii() and port.isdigit() and _SLOT_NAME.fullmatch(name)):
                raise ValueError(f"{part!r} is not NAME=HOST:PORT")
            found.append(cls(name, host.removeprefix("[").removesuffix("]"), int(port)))
        if len({place.slot_id for place in found}) < len(found):
            raise ValueError("two agents have the same name")
        return tuple(found)


_SLOT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
MOST_SLOTS = 64
ELASTIC_REPLICAS = 4


@dataclass(frozen=True, slots=True)
class SlotSettings:
    range: SlotRange = SlotRange()
    """Slots on this machine, each with an agent, a directory and a pool of its own. 0: a gateway only, which uses the
    slots of the other gateways of its database. MIN..MAX: they come and go by what is needed."""
    most_replicas: int = 0
    """Replicas a slot takes. 0: what memory holds, and `ELASTIC_REPLICAS` where slots come and go: without a bound one
    slot would take everything and a second would never be needed."""
    pool_bytes: int = 0
    """Budget of the warm pool in shared memory; 0: half of what is free at the agent's start."""
    disk_bytes: int = 16 * 1024**3
    """Budget of the disk tier below it: forms that take longer to make than to read. 0: none."""
    keep_forms: bool = True
    """Whether such forms are also kept in an object store that other machines read."""
    warm_workers: int = 1
    """Forked workers kept ready. 0 makes every start pay for an import of torch."""
    orphan_s: float = 120.0
    """How long an agent and its replicas live on without a control plane. Shorter than a restart takes, and running
    requests are recomputed instead of carried on."""

    agents: tuple[AgentPlace, ...] = ()
    """Slots on other machines, which somebody else starts: where their agents listen."""
    agent_secret_file: str = ""
    """File with the secret that their tokens are derived from."""
    hold_s: float = 0.0
    """How long a slot that came as needed stays without a replica. 0: as long as getting it again would cost
    (`control_plane.slot_scaling`)."""

    @property
    def replicas_at_most(self) -> int:
        return self.most_replicas or (ELASTIC_REPLICAS if self.range.most > self.range.least else 0)


@dataclass(frozen=True, slots=True)
class ModelSettings:
    allowed: tuple[str, ...] = ("*",)
    """Patterns (fnmatch) of model URIs that may be deployed. `*` allows all; whoever deploys can then make this
    machine read any file it may read."""


@dataclass(frozen=True, slots=True)
class KvSettings:
    """Stored KV of requests that are over (`stoker kv`)."""

    quota_bytes: int = 16 * 1024**3
    """Most bytes kept per tenant; the packs worth least per byte go first. 0: no bound but the disk. KV of unfinished
    requests is not counted."""
    grace_s: float = 300.0
    """How long a retired pack is still there for whoever was told of it. Below a minute a replica may name what has
    just gone (which costs a recomputation)."""
    orphan_s: float = 3600.0
    """Pause between looks through the whole store for packs that nothing names: one list request per 1000 packs."""
    quarantine_s: float = 7 * 86400.0
    """How long a quarantined pack is kept for a look at it."""
    storage_microusd_per_gib_month: float = 24_700.0
    """What storing costs (S3 Standard's list price by default): a chunk that is expected to save less goes. 0: only
    the quota lets chunks go."""
    device_microusd_per_hour: int = 1_000_000
    """What device time counts as where the function has no price of its own."""


@dataclass(frozen=True, slots=True)
class StoreSettings:
    uri: str = ""
    """Where durable KV lies: `file:///FOLDER` or `s3://BUCKET/PREFIX?endpoint=URL&region=R&path_style=1`; empty: the
    data directory's `objects/`, and so does `http+stoker://HOST:PORT`, which says where slots on other machines reach
    this control plane for it. Several machines that share requests need one store. Holds no credentials: S3's come
    from the environment, a profile or the instance, as for every program that uses boto3."""
    slots_uri: str = ""
    """Where slots on other machines reach it, if that is neither the same nor `gateway.url`: `http+stoker://HOST:PORT`,
    an address that outlives this process and may be that of several gateways with the same folder."""


@dataclass(frozen=True, slots=True)
class TraceSettings:
    """Where a collector for OpenTelemetry is named by the usual variables (`OTEL_EXPORTER_OTLP_ENDPOINT`)."""

    share: float = 1.0
    """Of the requests that come without a `traceparent`: how many begin a trace, from 0 to 1. One that comes with it
    is told of as its caller decided."""


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """Slots as pods. Where this runs in a pod itself, the chart sets all of it."""

    backend: str = "local"
    """Where slots come from: `local`, this machine; `kubernetes`, the cluster. Then `SlotSettings.range` means
    nothing."""
    namespace: str = "default"
    """Where the objects are that this service sees, and no other."""
    release: str = "stoker"
    """Of the chart: objects and pods of other releases in the namespace are left alone."""
    pod_name: str = ""
    """Of the control plane itself, by which it signs the Lease."""
    pod_ip: str = ""
    """By which other gateways reach this one."""
    slot_image: str = ""
    """Image of slots whose SlotPool names none."""
    slot_pool: str = "default"
    """SlotPool for functions that name none. Where there is none of this name and one only, that one."""
    slot_pools_file: str = ""
    """YAML file of slot pools by name that this service makes and keeps; empty: they are made by hand."""
    slot_pools_owner: str = ""
    """ConfigMap with which those go."""
    kubeconfig: str = ""
    """How to reach a cluster from outside; empty: by the pod's service account."""
    function_objects: str = "own"
    """`own`: a Function object is kept in step with the API once somebody made it; `all`: functions that were made by
    the API get an object, too."""
    unschedulable_s: float = 900.0
    """How long a slot may wait for a node. Nodes with GPUs take minutes to come; what waits longer will hardly come."""
    pulling_s: float = 900.0
    """How long its image may take: 10 GiB at 20 MiB/s take nine minutes."""
    starting_s: float = 180.0
    """How long a slot may take from there until its agent answers."""
    trouble_s: float = 120.0
    """How long a fault that may pass (an image that cannot be pulled, a crash) is given before the slot is given up,
    and whoever waits for it learns why."""

    @property
    def pods(self) -> bool:
        return self.backend == "kubernetes"


@dataclass(frozen=True, slots=True)
class Settings:
    data_dir: Path
    """Where everything is kept: database, models, objects, keys."""
    http: HttpSettings = field(default_factory=HttpSettings)
    queue: QueueSettings = field(default_factory=QueueSettings)
    database: DatabaseSettings = field(default_factory=DatabaseSettings)
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    gateway: GatewaySettings = field(default_factory=GatewaySettings)
    slot: SlotSettings = field(default_factory=SlotSettings)
    models: ModelSettings = field(default_factory=ModelSettings)
    kv: KvSettings = field(default_factory=KvSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    traces: TraceSettings = field(default_factory=TraceSettings)
    kubernetes: KubernetesSettings = field(default_factory=KubernetesSettings)

    @property
    def database_path(self) -> Path:
        return self.data_dir / "stoker.db"

    @property
    def database_url(self) -> str:
        """Where the database is, as `Database.open` takes it."""
        return self.database.url or str(self.database_path)

    @property
    def shared(self) -> bool:
        """Whether other gateways may work on the same database."""
        return self.gateway.shared or bool(self.database.url)

    @property
    def models_dir(self) -> Path:
        return self.data_dir / "models"

    @property
    def objects_dir(self) -> Path:
        return self.data_dir / "objects"

    @property
    def store_uri(self) -> str:
        """As this process reaches it."""
        own = not self.store.uri or self.store.uri.startswith("http+stoker:")
        return self.objects_dir.resolve().as_uri() if own else self.store.uri

    @property
    def slot_store_uri(self) -> str:
        """The same store as slots on other machines reach it; empty: they cannot."""
        if self.store.slots_uri:
            return self.store.slots_uri
        if not self.store.uri or self.store.uri.startswith("file:"):
            address = self.gateway.url.rstrip("/")
            return address.replace("http://", "http+stoker://", 1) if address.startswith("http://") else ""
        return self.store.uri

    @property
    def admin_key_path(self) -> Path:
        return self.data_dir / "admin.key"

    @property
    def slots_dir(self) -> Path:
        return self.data_dir / "slots"
