"""Messages: packed and read back unchanged, in order over real gloo, however large, with a limit on those under way."""

import itertools
import random
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autobd import ranks
from autobd.cluster import Cluster
from autobd.ranks import EPOCH, STEP, STOP, Header
from autobd.ranks.message import Packing, is_dense, read_header, read_tensors

# ------------------------------------------------------------------ packing

HEADERS = st.builds(
    Header,
    st.sampled_from([STEP, EPOCH, STOP]),
    *[st.integers(0, 2**62)] * 4,
    st.floats(allow_nan=False),
)
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64),
    *(torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


def bits(tensor):
    """The bytes of a tensor's elements, in order."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1)).view(torch.uint8)


@st.composite
def tensors(draw, dtypes=DTYPES):
    dtype = draw(st.sampled_from(dtypes))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    count = torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count * dtype.itemsize,), generator=generator)
    plain = raw.to(torch.uint8).view(dtype).view(shape)
    kind = draw(st.sampled_from(["plain", "permuted", "sliced", "expanded", "offset", "channels last"]))
    if kind == "permuted":
        return plain.permute(draw(st.permutations(range(len(shape)))))
    if kind == "sliced" and shape:
        return plain[..., ::2]
    if kind == "expanded" and shape and shape[-1]:
        return plain[..., :1].expand(*shape[:-1], 3)
    if kind == "offset" and shape:
        return plain[1:]
    if kind == "channels last" and len(shape) == 4:
        return plain.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    return plain


@settings(max_examples=300, deadline=None)
@given(HEADERS, st.lists(tensors(), max_size=4), st.integers(0, 200))
def test_a_message_is_read_as_it_was_packed(header, values, spare):
    packing = Packing.of(header, values)
    buffer = torch.full((packing.size + spare,), 255, dtype=torch.uint8)
    packing.write(buffer)
    assert torch.equal(buffer[packing.size :], torch.full((spare,), 255, dtype=torch.uint8))
    (found, apart), received = read_header(buffer), read_tensors(buffer)
    assert apart is None
    assert found == header
    assert len(received) == len(values)
    for given_tensor, tensor in zip(values, received, strict=True):
        assert (tensor.dtype, tensor.shape) == (given_tensor.dtype, given_tensor.shape)
        assert torch.equal(bits(tensor), bits(given_tensor))
        if tensor.numel():
            contiguous = torch.empty(tensor.shape).stride()
            assert tensor.stride() == (given_tensor.stride() if is_dense(given_tensor) else contiguous)


@settings(max_examples=200, deadline=None)
@given(tensors([torch.float32]))
def test_dense_is_what_fills_a_stretch_of_memory_once(tensor):
    places = {
        sum(i * s for i, s in zip(index, tensor.stride(), strict=True))
        for index in itertools.product(*map(range, tensor.shape))
    }
    fills = len(places) == tensor.numel() and (not places or max(places) == tensor.numel() - 1)
    if tensor.numel():
        assert is_dense(tensor) == fills


@pytest.mark.parametrize("make", [torch.conj, torch._neg_view, lambda t: t.conj().imag, lambda t: t.real])
def test_what_torch_computes_later_is_packed_as_its_values(make):
    tensor = make(torch.randn(3, 4, dtype=torch.complex64))
    packing = Packing.of(Header(), [tensor])
    buffer = torch.empty(packing.size, dtype=torch.uint8)
    packing.write(buffer)
    assert torch.equal(read_tensors(buffer)[0], tensor)


def test_tensors_that_travel_apart_are_read_from_their_own_buffer():
    tensors = [torch.randn(3, 4), torch.arange(5), torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)]
    header = Header(step=3, batch=8, first=2, last=5, progress=0.25, sizes=2)
    packing = Packing.of(header, tensors, outside=True)
    head, payload = (torch.empty(n, dtype=torch.uint8) for n in (packing.size, packing.payload))
    packing.write(head)
    packing.write_payload(payload)
    assert read_header(head) == (header, packing.payload)
    for mine, sent in zip(read_tensors(head, payload), tensors, strict=True):
        assert torch.equal(mine, sent)
        assert mine.stride() == sent.stride()


# ------------------------------------------------------------------ two ranks


@pytest.fixture(scope="module")
def group():
    with ranks.open(Cluster(("cpu", "cpu")), timeout=20, threads=1) as opened:
        yield opened


def threads_of_edges():
    return [t for t in threading.enumerate() if t.name.startswith(("send to", "receive from"))]


def values(seed, sizes):
    """What both ranks make for themselves: tensors of so many elements, some of them not contiguous."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(size, generator=generator) for size in sizes]
    return [t.view(2, -1).t() if len(t) % 2 == 0 and len(t) else t for t in made]


SIZES = st.lists(st.lists(st.sampled_from([0, 1, 10, 1000, 5000, 100_000]), max_size=3), min_size=1, max_size=8)


@pytest.mark.timeout(60)
@settings(max_examples=25, deadline=None)
@given(SIZES, st.integers(1, 4), st.integers(0, 99), st.booleans())
def test_messages_that_grow_and_shrink_arrive_in_order_and_unchanged(group, sizes, slots, seed, slow):
    def send(peers):
        sender = peers.sender(0, 3, slots, "boundaries")
        for step, own in enumerate(sizes):
            sender.send(Header(STEP, step, batch=len(own), progress=step / 7), values(seed + step, own))
        sender.send(Header(STOP, len(sizes)))
        sender.join()

    def take(peers):
        receiver = peers.receiver(1, 3, "boundaries")
        for step, own in enumerate(sizes):
            if slow and step % 3 == 0:
                time.sleep(0.01)
            if step % 2:
                assert receiver.peek() == Header(STEP, step, batch=len(own), progress=step / 7)
            header, found = receiver.take()
            assert header == Header(STEP, step, batch=len(own), progress=step / 7)
            for a, b in zip(found, values(seed + step, own), strict=True):
                assert torch.equal(a, b)
                assert a.stride() == b.stride()
        assert receiver.take() == (Header(STOP, len(sizes)), [])
        receiver.join()

    group.run(take, {1: send})
    assert not threads_of_edges()


@pytest.mark.timeout(60)
def test_a_message_stays_as_it_is_until_the_next_one_is_taken(group):
    def send(peers):
        sender = peers.sender(0, 0, 2, "boundaries")
        for step in range(6):
            sender.send(Header(STEP, step), [torch.full((500,), step)])
        sender.send(Header(STOP))
        sender.join()

    def take(peers):
        receiver = peers.receiver(1, 0, "boundaries")
        for step in range(6):
            (_, (tensor,)) = receiver.take()
            time.sleep(0.05)  # the sender goes on meanwhile
            assert torch.equal(tensor, torch.full((500,), step))
        receiver.take()
        receiver.join()

    group.run(take, {1: send})


@pytest.mark.timeout(60)
@pytest.mark.parametrize("size", [10, 20_000])
@pytest.mark.parametrize("slots", [1, 2, 5])
def test_a_sender_waits_while_its_slots_are_under_way(group, slots, size):
    def take(peers):
        sent = []

        def send():
            for step in range(20):
                sender.send(Header(STEP, step), [torch.full((size,), step)])
                sent.append(step)
            sender.send(Header(STOP))

        sender = peers.sender(1, 5, slots, "boundaries")
        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.6)
        stopped = len(sent)
        time.sleep(0.4)
        assert len(sent) == stopped
        assert stopped <= slots + 3  # two receives are posted ahead, in three buffers
        assert stopped >= min(slots, 2) - (size > 1000)
        told = peers.sender(1, 6, 2, "go on")
        told.send(Header(STEP))
        told.send(Header(STOP))
        thread.join()
        for end in (sender, told):
            end.join()
        return stopped

    def late(peers):
        receiver, go = peers.receiver(0, 5, "boundaries"), peers.receiver(0, 6, "go on")
        go.take(), go.take()
        for step in range(20):
            header, (tensor,) = receiver.take()
            assert header.step == step
            assert torch.equal(tensor, torch.full((size,), step))
        receiver.take()
        receiver.join(), go.join()

    group.run(take, {1: late})
    assert not threads_of_edges()


@pytest.mark.timeout(60)
@settings(max_examples=10, deadline=None)
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=12), st.integers(0, 99))
def test_edges_between_the_same_ranks_do_not_mix(group, order, seed):
    edges = {"a": 0, "b": 1, "c": 9}
    taken = list(order)
    random.Random(seed).shuffle(taken)
    counts = {e: order.count(e) for e in edges}
    sizes = {"a": 3, "b": 3, "c": 30_000}

    def send(peers):
        senders = {e: peers.sender(0, tag, len(order) + 3, e) for e, tag in edges.items()}
        back = peers.receiver(0, 2, "back")
        numbers = dict.fromkeys(edges, 0)
        for edge in order:
            senders[edge].send(Header(STEP, numbers[edge]), [torch.full((sizes[edge],), ord(edge) + numbers[edge])])
            numbers[edge] += 1
        for sender in senders.values():
            sender.send(Header(STOP))
        assert back.take()[1][0].tolist() == list(range(50))
        back.take()
        for end in (*senders.values(), back):
            end.join()

    def take(peers):
        receivers = {e: peers.receiver(1, tag, e) for e, tag in edges.items()}
        back = peers.sender(1, 2, 2, "back")
        back.send(Header(STEP), [torch.arange(50)])
        numbers = dict.fromkeys(edges, 0)
        for edge in taken:
            header, (tensor,) = receivers[edge].take()
            assert header.step == numbers[edge]
            assert torch.equal(tensor, torch.full((sizes[edge],), ord(edge) + numbers[edge]))
            numbers[edge] += 1
        assert numbers == counts
        for receiver in receivers.values():
            assert receiver.take()[0].kind == STOP
        back.send(Header(STOP))
        for end in (*receivers.values(), back):
            end.join()

    group.run(take, {1: send})
    assert not threads_of_edges()


@pytest.mark.timeout(60)
def test_a_receiver_that_keeps_messages_never_makes_the_sender_wait(group):
    def send(peers):
        sender = peers.sender(0, 0, 2, "losses")
        for step in range(200):
            sender.send(Header(STEP, step), [torch.full((1 + 50 * step,), step)])
        sender.send(Header(STOP))
        sender.join()  # the other end has taken nothing yet
        done = peers.sender(0, 1, 2, "done")
        done.send(Header(STEP))
        done.send(Header(STOP))
        done.join()

    def take(peers):
        receiver, done = peers.receiver(1, 0, "losses", keep=True), peers.receiver(1, 1, "done")
        done.take()
        kept = []
        while receiver.ready() and receiver.peek().kind == STEP:
            kept.append(receiver.take()[1][0])
        for step, tensor in enumerate(kept):  # all of them stay valid
            assert torch.equal(tensor, torch.full((1 + 50 * step,), step))
        assert len(kept) == 200
        done.take()
        receiver.join(), done.join()

    group.run(take, {1: send})
    assert not threads_of_edges()


@pytest.mark.timeout(60)
def test_after_a_stop_all_threads_end_on_both_sides_and_the_group_runs_further_jobs(group):
    def names():
        return [t.name for t in threading.enumerate() if t.name.startswith(("send to", "receive from"))]

    def other(peers):
        assert names() == []
        sender, receiver = peers.sender(0, 0, 2, "there"), peers.receiver(0, 1, "back")
        sender.send(Header(STEP, 7), [torch.ones(3)])
        sender.send(Header(STOP))
        assert receiver.take()[0].step == 7
        receiver.take()
        sender.join(), receiver.join()
        assert names() == []

    def own(peers):
        sender, receiver = peers.sender(1, 1, 2, "back"), peers.receiver(1, 0, "there")
        header, tensors = receiver.take()
        sender.send(header, tensors)
        receiver.take()
        sender.send(Header(STOP))
        sender.join(), receiver.join()
        return header.step

    for _ in range(5):
        assert group.run(own, {1: other}) == 7
        assert names() == []
    assert group.run(lambda peers: peers.rank, {}) == 0  # a run without the other rank
    assert group.run(own, {1: other}) == 7


@pytest.mark.timeout(60)
def test_sums_over_ranks_come_in_the_order_in_which_they_are_asked_for(group):
    def job(peers):
        reduce = peers.reducer([0, 1])
        tensors = [torch.full((n,), float(peers.rank + n)) for n in (1, 3, 10_000, 2)]
        pending = [reduce([t, t.clone()]) for t in tensors]
        for p in pending:
            p.result(peers.patience)
        return [t[0].item() for t in tensors]

    assert group.run(job, {1: job}) == [3.0, 7.0, 20001.0, 5.0]
