"""One sample of every message that travels, every field set to something that is no default."""

from __future__ import annotations

from schemas.codec import Message, pack_ids
from schemas.control import Adopt, Beat, CancelWord, DeadLetter, Drain, Load, Placed
from schemas.decode import DecodeTask
from schemas.errors import ErrorInfo
from schemas.kv import (
    KvHandle,
    KvLend,
    KvLent,
    KvReady,
    KvSource,
    LeaseRelease,
    LeaseRenew,
)
from schemas.kv_events import (
    KvEvents,
    KvSnapshotAsk,
    KvSnapshotPart,
    RemovedBlocks,
    StoredRun,
    pack_hashes,
)
from schemas.models import ModelCard
from schemas.prefill import PrefillTask
from schemas.profiles import StepCosts, WorkerProfile
from schemas.requests import (
    ChatMessage,
    InferenceRequest,
    RequestRecord,
    ResponseFormat,
    SamplingParams,
    Slo,
)
from schemas.tokenize import Detokenize, Detokenized, QuestionRefused, Tokenize, Tokenized
from schemas.tokens import (
    Accepted,
    Cancelled,
    Claim,
    Expired,
    StreamEnd,
    StreamError,
    TokenBatch,
    TokenDelta,
    TokenLogprob,
    TopLogprob,
    Usage,
)

REQUEST_ID = "0123456789abcdef0123456789abcdef"
READER = "bridge.bridge-a-1f2e"
SERVED = "org=2Ftiny@r1"

COSTS = StepCosts(
    prefill_base_ms=18.1,
    prefill_token_ms=0.1019,
    prefill_square_ms=7.12e-6,
    decode_base_ms=19.93,
    decode_context_ms=6.27e-4,
    decode_sequence_ms=0.0385,
)

SAMPLING = SamplingParams(
    max_tokens=64,
    min_tokens=2,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    repetition_penalty=1.125,
    logit_bias={7: -100.0, 11: 2.5},
    seed=2**64 - 1,
    stop=("\n\n", "END"),
    stop_token_ids=(2, 0),
    ignore_eos=True,
    logprobs=2,
    n=2,
    response_format=ResponseFormat(kind="json_schema", json_schema='{"type":"integer"}'),
)
RECORD = RequestRecord(
    request_id=REQUEST_ID,
    model="org/tiny",
    revision="r1",
    served=SERVED,
    prompt_ids=pack_ids([1, 2, 300, 70_000]),
    sampling=SAMPLING,
    reader=READER,
    admitted_unix_ms=1_790_000_000_000,
    deadline_unix_ms=1_790_000_600_000,
    tenant="acme",
    priority=-1,
    label="their own id",
    cache_salt="salt",
    cost=288.0,
    reader_note=b"\x00their own\xff",
    slo=Slo(ttft_ms=500.0, tbt_ms=50.0, name="chat"),
    is_direct=True,
)
HANDLE = KvHandle(
    lease_id="lease-1",
    secret=bytes(range(16)),
    owner="prefill-0-1f2e3d4c5b",
    fingerprint="f00d",
    num_tokens=4,
    blocks=pack_ids([5]),
    generations=pack_ids([9]),
    checksums=(0x0123456789ABCDEF).to_bytes(8, "little"),
    addresses=("shm://host/mesh-pool-1",),
    expires_unix_ms=1_790_000_010_000,
)
READY = KvReady(
    request_id=REQUEST_ID,
    epoch=1,
    after_seq=17,
    reader=READER,
    worker="prefill-0-1f2e3d4c5b",
    handle=HANDLE,
    tokens=(pack_ids([42]), pack_ids([43])),
    finished=("", "stop"),
    num_cached_tokens=3,
    record=RECORD,
)
HASHES = (bytes(range(16)), bytes(range(16, 32)))
STORED = StoredRun(
    tier="host", parent=bytes(range(32, 48)), hashes=pack_hashes(HASHES), also=("disk",)
)

SAMPLES: tuple[Message, ...] = (
    InferenceRequest(
        request_id=REQUEST_ID,
        model="org/tiny",
        messages=(
            ChatMessage(role="system", content="Answer in Ĝ or 漢字."),
            ChatMessage(role="user", content=[{"type": "text", "text": "Hi"}], name="ann"),
        ),
        prompt=(1, 2, 3),  # both at once is refused by admission, not by the codec
        sampling=SAMPLING,
        reader=READER,
        deadline_unix_ms=1_790_000_600_000,
        priority=-1,
        tenant="acme",
        label="their own id",
        cache_salt="salt",
        echo=True,
        reader_note=b"\x00their own\xff",
        slo=Slo(ttft_ms=500.0, tbt_ms=50.0),
    ),
    RECORD,
    PrefillTask(
        request_id=REQUEST_ID,
        epoch=3,
        after_seq=21,
        reader=READER,
        record=RECORD,
        kv_sources=(KvSource(worker="decode-0-99aabbccdd", num_blocks=7, tier="disk"),),
        overtakes=True,
        is_recorded=False,
    ),
    READY,
    DecodeTask(request_id=REQUEST_ID, epoch=2, after_seq=17, reader=READER, ready=READY),
    LeaseRelease(lease_id="lease-1", secret=bytes(range(16)), ok=False),
    LeaseRenew(lease_id="lease-1", secret=bytes(range(16))),
    KvLend(
        reader="prefill-0-1f2e3d4c5b",
        fingerprint="0011223344556677",
        parent=bytes(range(16)),
        hashes=bytes(range(32)),
        deadline_unix_ms=1_700_000_000_250,
    ),
    KvLent(num_blocks=2, handle=HANDLE, reason="busy"),
    TokenBatch(
        worker="decode-0-99aabbccdd",
        deltas=(
            TokenDelta(
                request_id=REQUEST_ID,
                epoch=2,
                number=1,
                ids=(44, 45),
                text=" sea",
                index=1,
                finish_reason="length",
                logprobs=(
                    TokenLogprob(
                        token_id=44,
                        token=" s",
                        logprob=-0.25,
                        top=(TopLogprob(token_id=46, token=" S", logprob=-1.5),),
                    ),
                ),
            ),
            TokenDelta(
                request_id=REQUEST_ID,
                epoch=2,
                number=3,
                ids=(44, 47, 45),
                text=" seas",
                sizes=(2, 0),
            ),
        ),
    ),
    Accepted(
        request_id=REQUEST_ID,
        model="org/tiny",
        revision="r1",
        prompt_tokens=4,
        max_tokens=64,
        admitted_unix_ms=1_790_000_000_000,
        deadline_unix_ms=1_790_000_600_000,
        echo_text="The",
        asked_model="org/large",
        asked_max_tokens=512,
    ),
    Claim(
        request_id=REQUEST_ID,
        epoch=2,
        worker="decode-0-99aabbccdd",
        role="decode",
        served=SERVED,
        deadline_unix_ms=1_790_000_600_000,
        num_tokens=37,
        max_tokens=64,
    ),
    StreamEnd(
        request_id=REQUEST_ID,
        epoch=2,
        num_tokens=(64, 12),
        finish_reasons=("length", "stop"),
        usage=Usage(prompt_tokens=4, completion_tokens=76, cached_tokens=3),
    ),
    StreamError(
        request_id=REQUEST_ID,
        epoch=2,
        error=ErrorInfo(
            code="queue_full", message="4096 requests wait", param="model", retry_after_s=2.5
        ),
    ),
    Cancelled(request_id=REQUEST_ID, reason="reader left"),
    Expired(request_id=REQUEST_ID),
    Beat(
        process="worker-decode-0-0a1b2c3d",
        kind="worker",
        state="draining",
        host="node-1",
        pid=4711,
        started_unix_ms=1_790_000_000_000,
        health_port=9101,
        worker="decode-0-99aabbccdd",
        roles=("decode",),
        served=SERVED,
        engine="torch",
        fingerprint="f00d",
        load=Load(
            num_running=2,
            num_waiting=1,
            num_free_slots=5,
            num_blocks=128,
            num_free_blocks=96,
            waiting_tokens=512,
            waiting_ms=81.5,
            context_tokens=1024,
            age_ms=12.5,
        ),
        reason="draining",
        max_sequence_tokens=8192,
        block_size=16,
        kv_seq=1234,
        costs=COSTS,
        profile="tiny-cpu",
        kv_token_bytes=23_040,
        rack="r12",
        zone="eu-1a",
    ),
    Placed(
        process="control-0a1b2c3d",
        request_id=REQUEST_ID,
        served=SERVED,
        worker="prefill-0-99aabbccdd",
        role="prefill",
        prefill_ms=18.5,
        num_tokens=512,
        there_ms=4.5,
    ),
    WorkerProfile(
        name="tiny-cpu",
        costs=COSTS,
        hardware="2 cores, AVX2",
        engine="native bf16",
        served=SERVED,
        kv_tokens=46_000,
        kv_token_bytes=23_040,
        prefill_error=0.03,
        decode_error=0.05,
        source="mesh profile",
        measured_unix_s=1_790_000_000,
    ),
    KvEvents(
        worker="decode-0-99aabbccdd",
        seq=1234,
        stored=(STORED,),
        removed=(RemovedBlocks(tier="device", hashes=HASHES[0], also=("host",)),),
        is_gap=True,
    ),
    KvSnapshotAsk(worker="decode-0-99aabbccdd", part=1, at_least_seq=1234),
    KvSnapshotPart(worker="decode-0-99aabbccdd", seq=1235, part=1, num_parts=2, stored=(STORED,)),
    CancelWord(request_id=REQUEST_ID),
    Adopt(process="bridge-b-0a1b2c3d", request_ids=(REQUEST_ID, "another-id")),
    Drain(process="worker-decode-0-0a1b2c3d", stay_down=True),
    DeadLetter(
        subject="mesh.v1.admission.org=2Ftiny",
        reason="not MessagePack",
        code="schema_error",
        payload=b"\x00\xff",
        headers={"Mesh-Request": REQUEST_ID},
        stage="admission",
        process="control-a-0a1b2c3d",
        unix_ms=1_790_000_000_000,
        payload_bytes=1_000_000,
    ),
    Tokenize(
        model="org/tiny",
        prompt="Hi",
        messages=(ChatMessage(role="user", content="Hi"),),  # both at once: as above
        add_special_tokens=True,
        add_generation_prompt=False,
    ),
    Detokenize(model="org/tiny", ids=pack_ids([1, 2, 300])),
    Tokenized(ids=pack_ids([1, 2, 300]), max_model_len=2048),
    Detokenized(text="Hi"),
    QuestionRefused(
        error=ErrorInfo(code="invalid_request", message="no chat template", param="messages")
    ),
    ModelCard(
        name="org/tiny",
        revision="r1",
        served=SERVED,
        folder="models/tiny",
        architecture="llama",
        context_length=2048,
        vocab_size=512,
        has_chat_template=True,
        created_unix_s=1_790_000_000,
    ),
)
