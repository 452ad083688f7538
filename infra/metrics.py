"""Every metric of the mesh, declared here and nowhere else.

Names are ``mesh_<thing>_<unit>[_total]``, in seconds and bytes; labels come from closed sets
(stages, outcomes, error codes, states), never from ids. Each process makes one :class:`Metrics`
with a registry of its own, so that tests can make as many as they like.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from infra.steady import Counter, Gauge, Histogram
from infra.tally import TallyHistogram

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# From half a hop on the bus (0.3 ms) to the longest deadline.
_SECONDS = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1, 2, 5, 10, 20, 60, 120, 300, 900,
)  # fmt: skip
# Token gaps: finer around the 5 to 200 ms in which readers notice differences.
_GAPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5, 10)
_RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 4, 10)
_TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)


class Metrics:
    """The metrics of one process.

    Args:
        process_facts: also export CPU, memory and descriptors of this process.
    """

    def __init__(self, *, process_facts: bool = False) -> None:
        self.registry = registry = CollectorRegistry(auto_describe=True)
        if process_facts:
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)

        # Admission and bridge
        self.requests_admitted = Counter(
            "mesh_requests_admitted_total", "Requests that admission accepted", registry=registry
        )
        self.requests_refused = Counter(
            "mesh_requests_refused_total", "Requests refused, by error code",
            ["code"], registry=registry,
        )  # fmt: skip
        self.requests_ended = Counter(
            "mesh_requests_ended_total", "Requests answered by this bridge, by how they ended: "
            "stop, length, or an error code", ["outcome"], registry=registry,
        )  # fmt: skip
        self.open_requests = Gauge(
            "mesh_open_requests", "Requests that this bridge is answering", registry=registry
        )
        self.ttft_seconds = TallyHistogram(
            "mesh_ttft_seconds", "Bridge took the request until it wrote the first token",
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self.itl_seconds = TallyHistogram(
            "mesh_itl_seconds", "Gap between two token events of one stream, at the bridge",
            registry=registry, buckets=_GAPS,
        )  # fmt: skip
        self.e2e_seconds = TallyHistogram(
            "mesh_e2e_seconds", "Bridge took the request until it wrote the last byte",
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self.prompt_tokens = TallyHistogram(
            "mesh_prompt_tokens", "Prompt tokens of admitted requests",
            registry=registry, buckets=_TOKENS,
        )  # fmt: skip

        # The waiting room of admission
        self.waiting_requests = Gauge(
            "mesh_waiting_requests", "Accepted requests that wait in this control process for a "
            "worker with room, by priority, those beyond 16 as that", ["model", "priority"],
            registry=registry,
        )  # fmt: skip
        self.waiting_seconds = TallyHistogram(
            "mesh_waiting_seconds", "How long they waited there", registry=registry,
            buckets=_SECONDS,
        )  # fmt: skip
        self.tenant_requests = Counter(
            "mesh_tenant_requests_total", "Requests let go to the workers, by tenant: the first 32 "
            "that come, the others together", ["tenant"], registry=registry,
        )  # fmt: skip
        self.tenant_tokens = Counter(
            "mesh_tenant_tokens_total", "What they were charged in fairness between tenants: "
            "uncached prompt tokens, and 2 for each token expected", ["tenant"], registry=registry,
        )  # fmt: skip

        self._make_budget(registry)

        # Stages
        self.stage_handled = Counter(
            "mesh_stage_handled_total", "Work messages by stage and outcome",
            ["stage", "outcome"], registry=registry,
        )  # fmt: skip
        self.stage_seconds = Histogram(
            "mesh_stage_seconds", "From taking a work message to its ack",
            ["stage"], registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self.dead_letters = Counter(
            "mesh_dead_letters_total", "Messages that no stage could use",
            ["stage"], registry=registry,
        )  # fmt: skip
        self.takeovers = Counter(
            "mesh_takeovers_total", "Requests placed again because their owner fell silent or "
            "failed", registry=registry,
        )  # fmt: skip
        self.live_workers = Gauge(
            "mesh_live_workers", "Workers whose beats this process hears", ["role"],
            registry=registry,
        )  # fmt: skip

        # Workers
        self.tokens_generated = Counter(
            "mesh_tokens_generated_total", "Tokens sampled by this worker", registry=registry
        )
        self.tokens_computed = Counter(
            "mesh_tokens_computed_total", "Token positions run through the model",
            registry=registry,
        )  # fmt: skip
        self.tokens_cached = Counter(
            "mesh_tokens_cached_total", "Prompt tokens whose KV was found and not computed",
            registry=registry,
        )  # fmt: skip
        self.prompt_source_tokens = Counter(
            "mesh_prompt_source_tokens_total", "Prompt tokens by where their KV came from: "
            "computed, found on device, host or disk, or with another worker (remote), or handed "
            "over by the prefill worker", ["source"], registry=registry,
        )  # fmt: skip
        self.tokens_resent = Counter(
            "mesh_token_messages_resent_total", "Token messages published again because the "
            "stream had not confirmed them", registry=registry,
        )  # fmt: skip
        self.step_seconds = TallyHistogram(
            "mesh_step_seconds", "One engine step", registry=registry, buckets=_GAPS
        )
        self.step_pace = Gauge(
            "mesh_step_pace_ratio", "How long steps took lately, divided by how long they should "
            "have by the costs that this worker tells: 1 where its forecasts are right",
            ["part"], registry=registry,
        )  # fmt: skip
        self.sequences = Gauge(
            "mesh_sequences", "Sequences in this engine: running or waiting",
            ["state"], registry=registry,
        )  # fmt: skip
        self._make_kv(registry)

        # Bus
        self.bus_reconnects = Counter(
            "mesh_bus_reconnects_total", "Times the connection to the broker came back",
            registry=registry,
        )  # fmt: skip

    def _make_budget(self, registry: CollectorRegistry) -> None:
        self.budget_seconds = Gauge(
            "mesh_budget_seconds", "Device time of a model's workers, prefill and decode, as this "
            "control process sees it: used, and available within the times of the default class",
            ["model", "kind", "what"], registry=registry,
        )  # fmt: skip
        self.predicted_ttft_seconds = TallyHistogram(
            "mesh_predicted_ttft_seconds", "Time to the first token as predicted at admission",
            registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self.over_budget = Counter(
            "mesh_over_budget_requests_total", "Requests over their model's compute budget, by "
            "what became of them (wait, clamp, fallback, refuse) and by what was short (ttft, tbt, "
            "decode, kv)",
            ["verdict", "shortage"], registry=registry,
        )  # fmt: skip

    def _make_kv(self, registry: CollectorRegistry) -> None:
        self.kv_blocks = Gauge(
            "mesh_kv_blocks", "Blocks of each tier by state; a tier's states sum to its size",
            ["tier", "state"], registry=registry,
        )  # fmt: skip
        self.kv_tier_blocks = Counter(
            "mesh_kv_tier_blocks_total", "Blocks by tier and by what happened to them: hit, miss, "
            "stored, promoted, evicted, dropped, corrupt, failed",
            ["tier", "outcome"], registry=registry,
        )  # fmt: skip
        self.kv_disk_bytes = Gauge(
            "mesh_kv_disk_bytes", "What this worker's KV blocks take on disk", registry=registry
        )
        self.leases = Gauge(
            "mesh_leases", "Handles given out and neither released nor expired", registry=registry
        )
        self.leases_ended = Counter(
            "mesh_leases_ended_total", "Leases by how they ended: released, expired or dropped",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self.kv_transfer_seconds = Histogram(
            "mesh_kv_transfer_seconds", "Reading one handle's blocks, checksums included",
            ["transport"], registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self.kv_transfer_bytes = Counter(
            "mesh_kv_transfer_bytes_total", "Bytes of KV read from other workers",
            ["transport"], registry=registry,
        )  # fmt: skip

        self.kv_fetches = Counter(
            "mesh_kv_fetches_total", "Prefixes fetched from disk or another worker, by how that "
            "ended; what did not end in fetched was computed", ["source", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.kv_fetched_blocks = Counter(
            "mesh_kv_fetched_blocks_total", "Blocks that they brought to the host tier",
            ["source"], registry=registry,
        )  # fmt: skip
        self.kv_fetched_bytes = Counter(
            "mesh_kv_fetched_bytes_total", "Their bytes", ["source"], registry=registry
        )
        self.kv_fetch_seconds = Histogram(
            "mesh_kv_fetch_seconds", "How long a fetch was predicted to take, and was seen to",
            ["what"], registry=registry, buckets=_SECONDS,
        )  # fmt: skip
        self.kv_lends = Counter(
            "mesh_kv_lends_total", "Questions of other workers for blocks: lent, or why not",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self.kv_lent_blocks = Gauge(
            "mesh_kv_lent_blocks", "Blocks of the host tier pinned for other workers",
            registry=registry,
        )  # fmt: skip

        # The index of what workers hold, in each control process
        self.kv_index_blocks = Gauge(
            "mesh_kv_index_blocks", "Blocks that are known to lie somewhere", registry=registry
        )
        self.kv_index_changes = Counter(
            "mesh_kv_index_changes_total", "Blocks that workers said they stored or removed",
            registry=registry,
        )  # fmt: skip
        self.kv_index_gaps = Counter(
            "mesh_kv_index_gaps_total", "Times that what a worker said was missed",
            registry=registry,
        )  # fmt: skip
        self.kv_index_snapshots = Counter(
            "mesh_kv_index_snapshots_total", "Snapshots taken of a worker after that",
            registry=registry,
        )  # fmt: skip
        self.kv_index_evicted = Counter(
            "mesh_kv_index_evicted_total", "Blocks forgotten because the index was full",
            registry=registry,
        )  # fmt: skip
        self.placements = Counter(
            "mesh_placements_total", "Tasks placed, by role and reason: prefix, load, suffix (it "
            "stays at a decode worker), or any (whoever pulls first)", ["role", "reason"],
            registry=registry,
        )  # fmt: skip
        self.prefill_predicted = Histogram(
            "mesh_prefill_predicted_ratio", "From placing a prompt by name to its first token, "
            "divided by what was predicted", registry=registry, buckets=_RATIOS,
        )  # fmt: skip
        self.kv_index_lookups = Counter(
            "mesh_kv_index_lookups_total", "Prompts looked up: hit, somebody holds the first "
            "block; miss", ["outcome"], registry=registry,
        )  # fmt: skip

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format (:data:`CONTENT_TYPE`)."""
        return generate_latest(self.registry)
