"""`paraplan launch --guard`: what ranks hold alike stays so to the bit, or the job ends and says who is apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import ForkedLaunch, WriteScript

from paraplan.launch.guard import GUARD_EXIT_STATUS, Entry, GuardVerdict, Judge, Look, SumsReader
from paraplan.launch.ranks.replica_sums import ReplicaSums, sum_of_bits
from paraplan.launch.torch_private import replicas

ALL, NOBODY, UNKNOWN = ((0, 1, 2, 3),), (), None
Sums = list[list[int]]
"""Of each look the sum on each of four ranks."""


def judged(kind: str, groups: tuple[tuple[int, ...], ...] | None, sums: Sums) -> tuple[GuardVerdict | None, list[str]]:
    said: list[str] = []
    judge = Judge(4, said.append)
    entries: tuple[Entry, ...] = (("layer.weight", kind, groups), ("other", "parameter", ALL))
    for step, row in enumerate(sums):
        for rank, value in enumerate(row):
            verdict = judge.add(rank, [Look(step, 0, step, entries, [value, step])])
            if verdict is not None:
                return verdict, said
    return None, said


APART = {
    "a replica of DDP that is apart": ("parameter", ALL, [[1] * 4, [2, 2, 3, 2]], (2,)),
    "a replica of no wrapper that is apart later": ("parameter", UNKNOWN, [[1] * 4, [2] * 4, [3, 4, 3, 3]], (1,)),
    "a replica of no wrapper that is apart at once": ("parameter", UNKNOWN, [[1] * 4, [2, 2, 2, 5]], (3,)),
    "copies of parts that ranks hold in pairs": (
        *("parameter", UNKNOWN, [[1, 2, 1, 2], [3, 4, 3, 4], [5, 6, 7, 6]]),
        (0, 2),
    ),
    "state of an optimizer": ("state", ALL, [[1] * 4, [2] * 4, [3, 3, 3, 9]], (3,)),
    "a buffer that was constant": ("renewed", UNKNOWN, [[1] * 4, [1] * 4, [1, 7, 1, 1], [1, 7, 1, 1]], (1,)),
    "a frozen parameter": ("parameter", UNKNOWN, [[1] * 4, [1, 1, 1, 8], [1, 1, 1, 8]], (3,)),
    "the same data": ("batch", ALL, [[5, 6, 7, 5], [8, 6, 9, 8]], (0, 3)),
}


@pytest.mark.parametrize("case", APART)
def test_ranks_that_are_apart_are_named_with_the_tensor_and_the_step(case: str) -> None:
    kind, groups, sums, ranks = APART[case]
    verdict, _ = judged(kind, groups, sums)
    assert verdict is not None
    assert verdict.ranks == ranks
    assert ("read the same data" in verdict.text) if kind == "batch" else ("layer.weight" in verdict.text)
    assert "step" in verdict.text


RIGHT = {
    "shards": ("parameter", NOBODY, [[1, 2, 3, 4], [5, 6, 7, 8]], ""),
    "parts that begin with zeros": ("parameter", UNKNOWN, [[0] * 4, [1, 2, 3, 4], [5, 6, 7, 8]], "never reduced"),
    "parts of their own": ("parameter", UNKNOWN, [[1, 2, 3, 4], [2, 3, 4, 5]], ""),
    "nothing moves while the rate is zero": ("parameter", UNKNOWN, [[1] * 4, [1] * 4, [2] * 4, [3] * 4], ""),
    "batch statistics of each rank": ("buffer", UNKNOWN, [[1, 2, 3, 4], [5, 6, 7, 8]], "SyncBatchNorm"),
    "batch statistics that DDP renews": ("renewed", UNKNOWN, [[1, 2, 3, 4], [5, 6, 7, 8]], ""),
    "an average that one rank keeps": ("buffer", UNKNOWN, [[1] * 4, [2, 1, 1, 1], [3, 1, 1, 1]], ""),
    "state of ranks that compress": ("state", UNKNOWN, [[1] * 4, [2, 3, 4, 5], [6, 7, 8, 9]], ""),
    "one batch for ever": ("batch", ALL, [[5] * 4, [5] * 4, [5] * 4], ""),
    "the same rows once": ("batch", ALL, [[5] * 4, [6, 7, 8, 9], [5] * 4], ""),
    "no model that divides data": ("batch", NOBODY, [[5] * 4, [6] * 4], ""),
}


@pytest.mark.parametrize("case", RIGHT)
def test_what_ranks_may_hold_unlike_ends_no_job(case: str) -> None:
    kind, groups, sums, note = RIGHT[case]
    verdict, said = judged(kind, groups, sums)
    assert verdict is None
    assert len(said) == bool(note), said
    assert note in "".join(said)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    kind=st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64, torch.bool]),
    bit=st.integers(0, 7),
    data=st.data(),
)
def test_one_flipped_bit_is_another_sum_and_an_order_in_memory_is_not(
    shape: list[int], kind: torch.dtype, bit: int, data: st.DataObject
) -> None:
    values = (torch.randn(shape) * 3).to(kind)
    before = int(sum_of_bits(values))
    assert int(sum_of_bits(values.clone())) == before
    in_bytes = values.view(-1).view(torch.uint8)
    at = data.draw(st.integers(0, in_bytes.numel() - 1))
    in_bytes[at] ^= 1 << (0 if kind is torch.bool else bit)
    assert int(sum_of_bits(values)) != before
    if values.ndim == 4:
        permuted = values.contiguous(memory_format=torch.channels_last)
        assert int(sum_of_bits(permuted)) == int(sum_of_bits(permuted.clone()))


def test_an_optimizer_in_the_memory_of_one_that_is_gone_is_another(tmp_path: Path) -> None:
    sums, reader = ReplicaSums(str(tmp_path), 1, replicas), SumsReader(tmp_path)
    numbers = []
    for _ in range(20):
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sums._before_step(optimizer)
        sums._after_step(optimizer)
        numbers += [(look.optimizer, look.step) for look in reader.read()]
        del model, optimizer
    assert numbers == [(number, step) for number in range(20) for step in range(2)]
    assert not sums._watched


TRAIN = """
    import sys
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    fault = sys.argv[1]

    def train(wrap, kind=torch.optim.AdamW, norm=nn.LayerNorm):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(16, 32), norm(32), nn.Linear(32, 4))
        model = wrap(plain)
        optimizer = kind(model.parameters())
        random = torch.Generator().manual_seed(0 if fault == "data" else rank)
        for step in range(7):
            model(torch.randn(8, 16, generator=random)).square().mean().backward()
            if model is plain and wrap is by_hand:
                for parameter in plain.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            optimizer.zero_grad()
            if fault == "flip" and step == 3 and rank == 1:
                next(plain.parameters()).data.view(torch.int32)[2, 3] ^= 1 << 4

    def by_hand(model):
        return model
    def sharded(model):
        return fully_shard(model) or model
    def in_pairs(model):
        fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "shard")))
        return model
    def first_fsdp(model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    ddp = nn.parallel.DistributedDataParallel
    def zero(parameters):
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW)

    train(ddp)
    if fault == "none":
        for wrap in (by_hand, sharded, in_pairs, first_fsdp):
            train(wrap)
        train(ddp, zero)
        train(by_hand, norm=nn.BatchNorm1d)
    dist.destroy_process_group()
    """


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        pytest.param("none", "the buffer 1.running_mean is another on each of ranks 0-1", marks=pytest.mark.with_all),
        ("flip", "ranks 0-1 have unlike values of the parameter 0.weight after step 6, alike after step 3; ending"),
        ("data", "ranks 0-1 read the same data in steps 2 and 3"),
    ],
)
def test_faults_end_a_job_with_a_report_and_right_training_runs_on(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path, fault: str, told: str
) -> None:
    done = launch_forked("--guard", 3, "--log-dir", "run", "--nproc-per-node", 2, script(TRAIN), fault)
    assert done.returncode == (0 if fault == "none" else GUARD_EXIT_STATUS), done.stderr
    assert told in done.stderr
    assert "--guard ends in this rank" not in done.stderr
    assert not list(tmp_path.rglob("sums*"))
