"""Training and communication on simulated NPUs give what one CPU process gives."""

import copy
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

BOTH = ["hccl", "cpu:gloo,npu:hccl"]


class Block(nn.Module):
    """One transformer layer; its attention is written out, so that no fused kernel decides."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (
            self.qkv(self.norms[0](x))
            .view(batch, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attended = scores.masked_fill(causal, float("-inf")).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(self, vocabulary=50, width=32):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def loss_of(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def seeded_model():
    torch.manual_seed(0)
    return Transformer()


def tokens(batch=4):
    return torch.randint(50, (batch, 9), generator=torch.Generator().manual_seed(1))


# -- one device ------------------------------------------------------------------------------------


@pytest.mark.reference
@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_five_steps_of_a_transformer_are_bit_equal_to_the_cpu(dtype, foreach):
    host = seeded_model().to(dtype)
    there = copy.deepcopy(host).npu()
    losses = []
    for model in (host, there):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach)
        data = tokens().to(model.head.weight.device)
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(model, data)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    assert losses[:5] == losses[5:]
    assert losses[4] < losses[0]
    for (name, ours), theirs in zip(there.named_parameters(), host.parameters(), strict=True):
        assert torch.equal(ours.cpu(), theirs), name
        assert torch.equal(ours.grad.cpu(), theirs.grad), name


# -- several devices -------------------------------------------------------------------------------


def join(backend):
    rank = int(os.environ["RANK"])
    torch.npu.set_device(rank)
    dist.init_process_group(backend)
    assert dist.get_backend() == backend.rpartition(":")[2] or ":" in backend
    return rank, dist.get_world_size()


def of(rank, *shape, dtype=torch.float32):
    """A tensor that only this rank has."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 8, shape, generator=generator).to(dtype)


def every_collective(backend, dtype):
    """What each collective gave here, by its name, and what it must give."""
    rank, world = join(backend)
    mine = of(rank, world, 300, dtype=dtype)  # 300 is no multiple of HCCL's alignment
    all_of_them = torch.stack([of(r, world, 300, dtype=dtype) for r in range(world)])
    total = all_of_them.sum(0).to(dtype)
    seen = {}

    def check(name, got, expected):
        assert name not in seen
        seen[name] = got.cpu() if got is not None else None, expected

    tensor = mine.npu()
    dist.all_reduce(tensor)
    check("all_reduce", tensor, total)
    tensor = mine.npu()
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    check("all_reduce max", tensor, all_of_them.amax(0))
    tensor = mine.npu()
    dist.reduce(tensor, dst=1)
    check("reduce", tensor if rank == 1 else None, total if rank == 1 else None)
    tensor = mine.npu()
    dist.broadcast(tensor, src=2)
    check("broadcast", tensor, all_of_them[2])

    gathered = [torch.empty_like(mine, device="npu") for _ in range(world)]
    dist.all_gather(gathered, mine.npu())
    check("all_gather", torch.stack(gathered), all_of_them)
    gathered = torch.empty_like(all_of_them, device="npu")
    dist.all_gather_into_tensor(gathered, mine.npu())
    check("all_gather_into_tensor", gathered, all_of_them)
    uneven = [torch.empty(r + 1, dtype=dtype, device="npu") for r in range(world)]
    dist.all_gather(uneven, mine[0, : rank + 1].npu())
    check(
        "all_gather uneven",
        torch.cat(uneven),
        torch.cat([all_of_them[r, 0, : r + 1] for r in range(world)]),
    )
    gathered = [torch.empty_like(mine, device="npu") for _ in range(world)] if rank == 0 else None
    dist.gather(mine.npu(), gathered, dst=0)
    check(
        "gather", torch.stack(gathered) if rank == 0 else None, all_of_them if rank == 0 else None
    )

    part = torch.empty(300, dtype=dtype, device="npu")
    dist.reduce_scatter(part, list(mine.npu()))
    check("reduce_scatter", part, total[rank])
    part = torch.empty(300, dtype=dtype, device="npu")
    dist.reduce_scatter_tensor(part, mine.npu())
    check("reduce_scatter_tensor", part, total[rank])
    part = torch.empty(300, dtype=dtype, device="npu")
    dist.scatter(part, list(mine.npu()) if rank == 1 else None, src=1)
    check("scatter", part, all_of_them[1, rank])

    received = torch.empty_like(mine, device="npu")
    dist.all_to_all_single(received, mine.npu())
    check("all_to_all_single", received, all_of_them[:, rank])
    received = [torch.empty(300, dtype=dtype, device="npu") for _ in range(world)]
    dist.all_to_all(received, list(mine.npu()))
    check("all_to_all", torch.stack(received), all_of_them[:, rank])
    sent, taken = [rank + r + 1 for r in range(world)], [rank + r + 1 for r in range(world)]
    received = torch.empty(sum(taken), dtype=dtype, device="npu")
    blocks = torch.cat([mine[r, :n] for r, n in enumerate(sent)])
    dist.all_to_all_single(received, blocks.npu(), taken, sent)
    expected = torch.cat([all_of_them[r, rank, :n] for r, n in enumerate(taken)])
    check("all_to_all_single uneven", received, expected)

    after, before = (rank + 1) % world, (rank - 1) % world
    received = torch.empty_like(mine, device="npu")
    if rank == 0:
        dist.send(mine.npu(), after)
        dist.recv(received, before)
    else:
        dist.recv(received, before)
        dist.send(mine.npu(), after)
    check("send recv", received, all_of_them[before])
    big = mine.repeat(500, 1)  # more than fits the simulator's buffers
    received = torch.empty_like(big, device="npu")
    operations = [
        dist.P2POp(dist.isend, big.npu(), after),
        dist.P2POp(dist.irecv, received, before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    check("batch_isend_irecv", received, all_of_them[before].repeat(500, 1))
    tensor = mine.repeat(900, 1).npu()
    dist.all_reduce(tensor)
    check("all_reduce large", tensor, total.repeat(900, 1))

    flag = torch.tensor([rank == 1], device="npu")
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    check("all_reduce bool", flag, torch.tensor([True]))
    pair = dist.new_group([0, 2])
    tensor = mine.npu()
    if rank != 1:
        dist.all_reduce(tensor, group=pair)
    check("subgroup", tensor, mine if rank == 1 else (all_of_them[0] + all_of_them[2]).to(dtype))
    objects = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    check("all_gather_object", torch.tensor([o["rank"] for o in objects]), torch.arange(world))
    one = [f"from {rank}"]
    dist.broadcast_object_list(one, src=2)
    check("broadcast_object_list", torch.tensor(one == ["from 2"]), torch.tensor(True))
    if "gloo" in backend:
        tensor = mine.clone()
        dist.all_reduce(tensor)
        check("all_reduce on the host", tensor, total)
    dist.barrier()
    dist.destroy_process_group()
    return seen


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(BOTH[0], torch.float32), (BOTH[1], torch.float32), (BOTH[0], torch.bfloat16)],
)
def test_every_collective_of_the_real_process_group(ranks, backend, dtype):
    shared = set(Path("/dev/shm").iterdir())
    for rank, seen in enumerate(ranks(every_collective, 3, backend, dtype)):
        assert len(seen) == 21 + (":" in backend)
        for name, (got, expected) in seen.items():
            if expected is None:
                assert got is None
            else:
                assert torch.equal(got, expected), f"{name} on rank {rank}"
    assert not [p for p in set(Path("/dev/shm").iterdir()) - shared if "hccl" in p.name]


def data_parallel(backend):
    rank, world = join(backend)
    model = nn.parallel.DistributedDataParallel(seeded_model().npu(), device_ids=[rank])
    share = tokens().chunk(world)[rank].npu()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, share)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    average = torch.stack(losses)
    dist.all_reduce(average, op=dist.ReduceOp.AVG)
    dist.destroy_process_group()
    return average.cpu(), {n: p.grad.cpu() for n, p in model.module.named_parameters()}


@pytest.mark.plumbing
@pytest.mark.parametrize("backend", BOTH)
def test_data_parallel_equals_one_process(ranks, backend):
    model = seeded_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, tokens())
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    for losses, gradients in ranks(data_parallel, 2, backend):
        torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-5, atol=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                gradients[name],
                parameter.grad,
                rtol=1e-4,
                atol=1e-6,
                msg=lambda m, n=name: f"{n}: {m}",
            )


class Copy(torch.autograd.Function):
    """The same input on all ranks; its gradients add up."""

    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Partial outputs add up; each rank gets the whole gradient."""

    @staticmethod
    def forward(context, x):
        x = x.contiguous()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(context, grad):
        return grad


class Feedforward(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(16, 64)
        self.down = nn.Linear(64, 16)

    def forward(self, x):
        return F.linear(F.gelu(self.up(x)), self.down.weight) + self.down.bias


def tensor_parallel(backend):
    rank, world = join(backend)
    whole = Feedforward()
    up = whole.up.weight.chunk(world)[rank].detach().npu().requires_grad_()
    up_bias = whole.up.bias.chunk(world)[rank].detach().npu().requires_grad_()
    down = whole.down.weight.chunk(world, dim=1)[rank].detach().npu().requires_grad_()
    down_bias = whole.down.bias.detach().npu().requires_grad_()
    x = of(0, 5, 16).npu().requires_grad_()
    hidden = F.gelu(F.linear(Copy.apply(x), up, up_bias))
    output = Reduce.apply(F.linear(hidden, down)) + down_bias
    loss = output.square().mean()
    loss.backward()
    dist.destroy_process_group()
    return loss.detach().cpu(), [t.grad.cpu() for t in (up, up_bias, down, down_bias, x)]


@pytest.mark.plumbing
@pytest.mark.parametrize("backend", BOTH)
def test_tensor_parallel_equals_one_process(ranks, backend):
    whole, x = Feedforward(), of(0, 5, 16).requires_grad_()
    loss = whole(x).square().mean()
    loss.backward()
    results = ranks(tensor_parallel, 2, backend)
    for got, _ in results:
        torch.testing.assert_close(got, loss.detach())
    (up, up_bias, down, down_bias, x_grad), second = results[0][1], results[1][1]
    torch.testing.assert_close(torch.cat([up, second[0]]), whole.up.weight.grad)
    torch.testing.assert_close(torch.cat([up_bias, second[1]]), whole.up.bias.grad)
    torch.testing.assert_close(torch.cat([down, second[2]], dim=1), whole.down.weight.grad)
    assert torch.equal(down_bias, second[3])
    torch.testing.assert_close(down_bias, whole.down.bias.grad)
    assert torch.equal(x_grad, second[4])
    torch.testing.assert_close(x_grad, x.grad)


# -- what goes wrong -------------------------------------------------------------------------------


def disagree(how):
    rank, _ = join("hccl")
    dist.barrier()
    try:
        if how == "size":
            dist.all_reduce(torch.ones(4 + rank, device="npu"))
        elif how == "type":
            dist.all_reduce(torch.ones(4, device="npu", dtype=[torch.float32, torch.int32][rank]))
        elif how == "operation":
            tensor = torch.ones(4, device="npu")
            dist.all_reduce(tensor) if rank else dist.broadcast(tensor, 0)
        elif how == "float64":
            dist.all_reduce(torch.ones(4, device="npu", dtype=torch.float64))
        elif how == "absent" and rank == 0:
            dist.all_reduce(torch.ones(4, device="npu"))
        elif how == "gone":
            dist.destroy_process_group() if rank else dist.all_reduce(torch.ones(4, device="npu"))
    except RuntimeError as error:
        return str(error)
    finally:
        if how == "absent" and rank == 1:
            time.sleep(3)
    return None


@pytest.mark.plumbing
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "size",
            "HcclAllReduce: the ranks disagree: rank 0 gives 16 bytes to rank 1, which expects 20",
        ),
        (
            "type",
            "HcclAllReduce: the ranks disagree: rank 0 calls HcclAllReduce (float32, sum, root 0), "
            "rank 1 calls HcclAllReduce (int32, sum, root 0)",
        ),
        (
            "operation",
            "rank 0 calls HcclBroadcast (float32, none, root 0), rank 1 calls HcclAllReduce",
        ),
        ("float64", "HCCL allreduce: Unsupported data type at::kDouble"),
    ],
)
def test_ranks_that_disagree_fail_and_say_how(ranks, how, says):
    for message in ranks(disagree, 2, how):
        assert says in message


@pytest.mark.plumbing
def test_waiting_too_long_fails_by_name(ranks, monkeypatch):
    monkeypatch.setenv("HCCL_EXEC_TIMEOUT", "1")
    first, _ = ranks(disagree, 2, "absent")
    assert "HcclAllReduce: rank 0 waited 1 s (HCCL_EXEC_TIMEOUT) for rank 1 of 2" in first


@pytest.mark.plumbing
def test_a_rank_that_left_is_not_waited_for(ranks):
    first, _ = ranks(disagree, 2, "gone")
    assert "HcclAllReduce: rank 0 waits for rank 1, whose process is gone" in first
