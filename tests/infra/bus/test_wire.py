import asyncio
import itertools

import nats.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.bus.incoming import Incoming
from infra.bus.wire import MessageParser, Msg, header_block, number_in, parse_headers

WORDS = st.text(st.characters(codec="ascii", exclude_categories=["Z", "C"]), min_size=1, max_size=9)
MESSAGES = st.lists(
    st.tuples(
        WORDS,
        st.integers(1, 99),
        st.sampled_from(["", "_INBOX.a.1"]),
        st.binary(max_size=80),
        st.dictionaries(st.sampled_from(["A-b", "Nats-Sequence"]), WORDS, max_size=2),
    ),
    max_size=6,
)


class Client:
    """What the parser speaks to."""

    def __init__(self, theirs=()):
        self.got = []
        self.theirs = theirs  # subscriptions of the library's
        self.num_theirs = 0
        self.num_pings = 0
        self.is_connected = True

    def deliver(self, sid, subject, reply, data, header):
        if sid in self.theirs:
            return False
        headers = parse_headers(header) if header else {}
        self.got.append((subject.decode(), sid, reply.decode(), data, headers))
        return True

    async def _process_msg(self, sid, subject, reply, data, header):
        if not self.deliver(sid, subject, reply, data, header or b""):
            self.num_theirs += 1

    async def _process_ping(self):
        self.num_pings += 1


def on_the_wire(subject, sid, reply, data, headers):
    reply = f"{reply} " if reply else ""
    if not headers:
        return f"MSG {subject} {sid} {reply}{len(data)}\r\n".encode() + data + b"\r\n"
    head = header_block(headers)
    sizes = f"{len(head)} {len(head) + len(data)}"
    return f"HMSG {subject} {sid} {reply}{sizes}\r\n".encode() + head + data + b"\r\n"


@given(MESSAGES, st.lists(st.integers(0, 600), max_size=6))
async def test_messages_arrive_however_reads_tear_them(messages, cuts):
    """Each message once, in order and whole, with control lines between, wherever reads end."""
    data = b"".join(on_the_wire(*message) + b"PING\r\n" for message in messages)
    client = Client()
    parser = MessageParser(client)
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    for start, end in itertools.pairwise(edges):
        await parser.parse(data[start:end])
    assert client.got == messages
    assert client.num_pings == len(messages)


@given(MESSAGES, st.lists(st.integers(0, 600), max_size=6), st.lists(st.booleans(), max_size=6))
async def test_what_the_librarys_loop_has_not_parsed_comes_first(messages, cuts, turns):
    """Whether that loop comes to its turn between two reads or not, the order is the wire's; and
    once it has nothing left, whole messages need it no more."""
    data = b"".join(on_the_wire(*message) + b"PING\r\n" for message in messages)
    client = Client()
    parser = MessageParser(client)
    stream = asyncio.StreamReader()
    inner = asyncio.StreamReaderProtocol(stream)
    num_early = min(cuts, default=0)
    stream.feed_data(data[:num_early])
    incoming = Incoming(inner, client, parser, len(data[:num_early]))
    parser.on_parsed = incoming.note_parsed

    async def parse_all():
        while not stream.at_eof():
            await parser.parse(await stream.read(64))

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(parse_all())
        edges = sorted({num_early, len(data), *(cut for cut in cuts if cut < len(data))})
        for (start, end), turn in zip(
            itertools.pairwise(edges), itertools.chain(turns, itertools.repeat(True)), strict=False
        ):
            incoming.data_received(data[start:end])
            await asyncio.sleep(0) if turn else None
        while client.num_pings < len(messages):
            await asyncio.sleep(0)
        incoming.data_received(on_the_wire("at.once", 1, "", b"", {}))
        assert client.got == [*messages, ("at.once", 1, "", b"", {})]
        stream.feed_eof()


async def test_what_has_no_callback_of_ours_is_the_librarys():
    """A message for a subscription of the library's goes to it, once, and holds up nobody's."""
    messages = [("a.b", sid, "", b"data", {}) for sid in (1, 2, 1, 2, 2, 1)]
    client = Client(theirs={2})
    parser = MessageParser(client)
    for message in messages:
        await parser.parse(on_the_wire(*message))
    await parser.parse(b"".join(on_the_wire(*message) for message in messages))
    assert client.got == 2 * [message for message in messages if message[1] == 1]
    assert client.num_theirs == 6


async def test_a_large_message_comes_in_many_reads():
    """What is too large to be kept torn goes through the library's buffer; what follows it is
    delivered as before."""
    message = ("a.b", 7, "", bytes(300_000), {})
    data = on_the_wire(*message) * 2 + on_the_wire("c", 8, "", b"x", {"A-b": "1"})
    client = Client()
    parser = MessageParser(client)
    for start in range(0, len(data), 32768):
        await parser.parse(data[start : start + 32768])
    assert client.got == [message, message, ("c", 8, "", b"x", {"A-b": "1"})]


async def test_a_new_connection_forgets_what_was_torn():
    """``reset`` drops the beginning of a message that will not be completed."""
    client = Client()
    parser = MessageParser(client)
    await parser.parse(b"MSG a 1 5\r\nab")
    parser.reset()
    await parser.parse(on_the_wire("b", 2, "", b"x", {}))
    assert client.got == [("b", 2, "", b"x", {})]


async def test_what_is_no_nats_is_an_error():
    """A line that the protocol does not know ends the connection."""
    with pytest.raises(nats.errors.ProtocolError):
        await MessageParser(Client()).parse(b"MSG a one 5\r\nabcde\r\n")


def test_a_header_can_end_no_line():
    """Line breaks in values become blanks; names that can't be are refused."""
    block = header_block({"A": "1\r\nB: 2"})
    assert block == b"NATS/1.0\r\nA: 1 B: 2\r\n\r\n"
    assert parse_headers(block) == {"A": "1 B: 2"}
    with pytest.raises(nats.errors.BadHeaderError):
        header_block({"A\r\nB": "1"})


def test_a_status_line_is_two_headers():
    """What the broker says itself has a number, maybe words, maybe headers behind them."""
    assert parse_headers(b"NATS/1.0 503\r\n\r\n") == {"Status": "503"}
    assert parse_headers(b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 3\r\n\r\n") == {
        "Status": "408",
        "Description": "Request Timeout",
        "Nats-Pending-Messages": "3",
    }


@given(
    st.lists(st.tuples(st.sampled_from(["A", "Nats-Sequence", "X"]), st.integers(0)), max_size=5)
)
def test_a_number_is_found_without_parsing_all_headers(lines):
    """The same as among the parsed headers, the last one where there are several."""
    text = "".join(f"{name}: {number}\r\n" for name, number in lines)
    header = f"NATS/1.0\r\n{text}\r\n".encode()
    found = parse_headers(header).get("Nats-Sequence")
    assert number_in(header, b"\r\nNats-Sequence: ") == (None if found is None else int(found))


def test_headers_of_a_message_are_those_of_its_bytes():
    """Parsed when asked for; None where there are none."""
    message = Msg("a", "", b"x", header_block({"A-b": "1"}))
    assert message.headers == {"A-b": "1"}
    assert message.headers is message.headers
    assert Msg("a", "", b"x").headers is None
