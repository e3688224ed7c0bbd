"""`paraplan launch --fake`: a script's ranks without GPUs, other ranks or values."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from case_selection import with_all
from factory_script import FACTORY
from forked_launch import Ended, launch_forked
from launching import Launch, StartForked, names_in, wait_until_dead
from rank_harness import RankHarness
from waiting import PATIENCE_S, wait_until

from paraplan.errors import ParaplanError
from paraplan.launch.fake.ranks import show_fake_launch
from paraplan.launch.fake.report import FakeLaunchReport, StageEstimate, render_report
from paraplan.launch.parser import parse_arguments
from paraplan.plan.fake import CountedCollective, FakeRankReport
from paraplan.plan.files import ModelReference, PlanFile
from paraplan.plan.parallel import ParallelPlan, ScheduleName
from paraplan.plan.training import TrainingSpec

SCRIPT = (
    FACTORY
    + """
import sys
from torch import nn
from paraplan import runtime
from paraplan.errors import UsageError


def main():
    if "--broken" in sys.argv:
        raise UsageError("the learning rate is missing", hint="give --lr")
    job = runtime.init()
    engine = job.prepare(
        build(),
        loss_fn=lambda logits, targets: nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        max_grad_norm=1.0,
    )
    data = [(torch.arange(16) % 7, torch.arange(16) % 7) for _ in range(256)]
    for inputs, targets in job.shard(data):
        print(engine.step(inputs, targets).item())
    raise AssertionError("the second step ends the script")


if __name__ == "__main__":
    main()
"""
)
PLAIN_SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda()
assert next(model.parameters()).is_cuda and torch.cuda.is_available()
if "--sharded" in sys.argv:
    mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model.register_buffer("left_on_the_host", torch.ones(8))
    for layer in (model[0], model[2], model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    assert model.left_on_the_host.is_cuda
elif "--flat" in sys.argv:
    model = FullyShardedDataParallel(model)
else:
    model = DistributedDataParallel(model, device_ids=[rank])
optimizer = torch.optim.AdamW(model.parameters()) if "--sharded" in sys.argv else torch.optim.SGD(model.parameters())
data = TensorDataset(torch.randn(8192, 256), torch.randn(8192, 256))
loader = DataLoader(data, batch_size=512, sampler=DistributedSampler(data), num_workers=2, pin_memory=True)
for inputs, targets in [] if "--idle" in sys.argv else loader:
    if "--forgetful" not in sys.argv:
        targets = targets.to("cuda", non_blocking=True)
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled="--sharded" not in sys.argv):
        loss = nn.functional.mse_loss(model(inputs.cuda()).float(), targets)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
    optimizer.step()
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    print(f"{loss.item():.3f}", loss.detach().cpu().numpy())
    torch.save(model.state_dict(), "checkpoint.pt")
"""
IDIOMS = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
with torch.device("meta" if "--meta" in sys.argv else "cpu"):
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
if "--meta" in sys.argv:
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    model.to_empty(device="cuda")
    model[0].reset_parameters()
    nn.init.normal_(model[2].weight)
else:
    model = DistributedDataParallel(model.to(rank), device_ids=[rank])
optimizer = torch.optim.Adam(model.parameters())
for _ in range(2):
    inputs = torch.randn(32, 64).to(rank)
    loss = nn.functional.mse_loss(model(inputs), torch.zeros(32, 64, device=rank) + inputs.cpu().cuda(rank))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
TRAINING = TrainingSpec(global_batch_size=16, seq_length=16, precision="fp32")
PLAN = ParallelPlan(dp=4, pp=2, micro_batch_size=2, num_microbatches=2, pipeline_schedule="1f1b")


Fake = Callable[..., Ended]


@pytest.fixture
def fake(ranks: RankHarness, tmp_path: Path) -> Fake:
    """Return a launch whose processes are forked: what a fake launch finds and says, without what Pythons import."""

    def launch_fake(*words: str) -> Ended:
        return launch_forked(ranks, tmp_path, "--fake", *words, environment={"CUDA_VISIBLE_DEVICES": ""})

    return launch_fake


def write(folder: Path, plan: ParallelPlan = PLAN, *, names_model: bool = True, num_blocks: int = 2) -> Path:
    """Write the script, and a plan of which there is an estimate where it names the model."""
    text = SCRIPT.replace("for _ in range(4)", f"for _ in range({num_blocks})")
    (folder / "train.py").write_text(text, encoding="utf-8")
    model = ModelReference(name="build", source=f"{folder / 'train.py'}:build") if names_model else None
    path = folder / "plan.json"
    path.write_text(PlanFile(plan=plan, model=model, training=TRAINING).to_json(), encoding="utf-8")
    return path


def test_one_rank_of_each_stage_is_run_and_compared(tmp_path: Path, fake: Fake) -> None:
    write(tmp_path)
    done = fake("8", "--plan", "plan.json", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    report = FakeLaunchReport.model_validate(json.loads(done.stdout))
    assert report.no_estimate is None
    assert [rank.rank for rank in report.ranks] == [0, 4]
    block, ends = 2 * 64 * 256 + 256 + 64, (256 * 64, 64 * 256 + 256)
    for rank, estimate, end in zip(report.ranks, report.estimates, ends, strict=True):
        assert rank.num_parameters == 2 * block + sum(ends)
        parts = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_state_bytes, rank.activation_bytes)
        assert sum(parts) + rank.workspace_bytes == rank.total_bytes
        assert rank.total_bytes == pytest.approx(estimate.total_bytes, rel=0.2)  # of a model whose tensors are tiny
        # What is sent: every gradient of the stage in fp32, and each micro-batch's boundary there or back.
        sent = {(one.operation, one.group): (one.count, one.total_bytes) for one in rank.collectives}
        assert sent["send", "pp"] == sent["receive", "pp"] == (2, 2 * 2 * 16 * 64 * 4)
        assert sent["all-reduce", "dp"][1] == pytest.approx(4 * (block + end), abs=64)  # and the loss


def test_what_is_offloaded_is_counted_apart_and_compared_with_the_estimate(tmp_path: Path, fake: Fake) -> None:
    write(tmp_path, ParallelPlan(dp=2, zero_stage=3, micro_batch_size=8, offload="parameters"))
    done = fake("2", "--plan", "plan.json", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    report = FakeLaunchReport.model_validate(json.loads(done.stdout))
    (rank,) = report.ranks
    assert rank.host is not None
    # Parameters and gradients of a shard, and two averages of each; one parameter's temporary tensor beside them.
    assert rank.host.total_bytes - rank.host.workspace_bytes == pytest.approx(16 * rank.num_parameters // 2, rel=0.1)
    assert rank.host.total_bytes == pytest.approx(report.estimates[0].host_bytes, rel=0.2)
    assert rank.optimizer_state_bytes == 0
    assert rank.total_bytes == pytest.approx(report.estimates[0].total_bytes, rel=0.2)


def test_the_states_of_several_optimizers_are_all_counted(tmp_path: Path, fake: Fake) -> None:
    write(tmp_path, ParallelPlan(dp=2, micro_batch_size=8))
    script, sizes = tmp_path / "train.py", []
    one = "torch.optim.AdamW(parameters, lr=1e-3)"
    two = "[torch.optim.AdamW(some, lr=1e-3) for some in (parameters[::2], parameters[1::2])]"
    for made in (one, two):
        script.write_text(script.read_text(encoding="utf-8").replace(one, made), encoding="utf-8")
        done = fake("2", "--plan", "plan.json", "--json", "train.py")
        assert done.returncode == 0, done.stderr
        (rank,) = FakeLaunchReport.model_validate(json.loads(done.stdout)).ranks
        sizes.append(rank.optimizer_state_bytes)
    assert sizes[0] == sizes[1] > 0


@pytest.mark.with_all  # a pipelined step counts all of them
@pytest.mark.parametrize("num_microbatches", [*with_all([3, 4]), 8])  # all of three, or some of more
def test_what_many_micro_batches_send_is_counted_of_all_though_three_are_run(
    num_microbatches: int, tmp_path: Path, fake: Fake
) -> None:
    plan = ParallelPlan(dp=2, zero_stage=2, micro_batch_size=1, num_microbatches=num_microbatches)
    write(tmp_path, plan, names_model=False)
    done = fake("2", "--plan", "plan.json", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    (rank,) = FakeLaunchReport.model_validate(json.loads(done.stdout)).ranks
    reduced = next(one for one in rank.collectives if one.operation == "reduce-scatter")
    # Two blocks and what stands outside of them, after every micro-batch; parameters are gathered once a step.
    assert (reduced.group, reduced.count) == ("dp", 3 * num_microbatches)
    assert reduced.total_bytes == pytest.approx(num_microbatches * 4 * rank.num_parameters, rel=0.01)
    gathered = next(one for one in rank.collectives if one.operation == "all-gather")
    assert gathered.count == 3


def traced(fake: Fake, folder: Path, num_microbatches: int, **plan: object) -> FakeRankReport:
    """Return what rank 2 of four finds, which holds the end of a pipeline of two, without an estimate beside it."""
    chosen = ParallelPlan.model_validate(
        {"micro_batch_size": 2} | plan | {"dp": 2, "pp": 2, "num_microbatches": num_microbatches}
    )
    write(folder, chosen, names_model=False, num_blocks=2 * chosen.virtual_pipeline_size)
    done = fake("4", "--fake-rank", "2", "--plan", "plan.json", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    return FakeLaunchReport.model_validate(json.loads(done.stdout)).ranks[0]


BOUNDARY = 2 * 16 * 64 * 4  # bytes of one micro-batch's hidden state, of which a stage that is not first receives each
BATCH = 2 * (2 * 16 * 8)  # bytes of its tokens and targets


@pytest.mark.parametrize(
    ("schedule", "virtual", "few", "many", "boundaries"),
    [
        pytest.param("1f1b", 1, 4, 8, 1, marks=pytest.mark.with_all),  # the others are 1F1B with something beside it
        ("zero_bubble", 1, 4, 8, 1),
        pytest.param("interleaved_1f1b", 2, 6, 12, 3, marks=pytest.mark.with_all),
    ],
)
def test_of_a_long_pipelined_step_as_much_is_run_as_tells_of_all(
    schedule: ScheduleName, virtual: int, few: int, many: int, boundaries: int, tmp_path: Path, fake: Fake
) -> None:
    whole, long = (
        traced(fake, tmp_path, count, pipeline_schedule=schedule, virtual_pipeline_size=virtual)
        for count in (few, many)
    )
    sent = {(one.operation, one.group): (one.count, one.total_bytes) for one in long.collectives}
    assert sent["receive", "pp"] == sent["send", "pp"] == (many * boundaries, many * boundaries * BOUNDARY)
    # Of each micro-batch more: buffers, its tokens and targets, a loss; zero bubble keeps gradients of inputs.
    kept = (many - few) * (boundaries * BOUNDARY + BATCH + 512)
    assert long.activation_bytes - whole.activation_bytes == kept
    assert long.workspace_bytes - whole.workspace_bytes == ((many - few) * BOUNDARY if schedule == "zero_bubble" else 0)
    assert long.gradient_bytes == whole.gradient_bytes


@pytest.mark.with_all  # long steps are cut short under 1F1B, below
def test_gpipe_keeps_as_much_of_micro_batches_that_are_not_run_as_of_others(tmp_path: Path, fake: Fake) -> None:
    # The tokens of four sequences have as many bytes as the allocator gives at once: each micro-batch adds whole units.
    four, five, nine = (  # of nine five are run
        traced(fake, tmp_path, count, pipeline_schedule="gpipe", micro_batch_size=4) for count in (4, 5, 9)
    )
    each = five.activation_bytes - four.activation_bytes
    assert each > 5 * 2 * BOUNDARY  # of its block the inputs of both layers
    assert nine.activation_bytes == five.activation_bytes + 4 * each
    assert nine.total_bytes == five.total_bytes + 4 * each
    sent = {(one.operation, one.group): (one.count, one.total_bytes) for one in nine.collectives}
    assert sent["receive", "pp"] == sent["send", "pp"] == (9, 9 * 2 * BOUNDARY)


def test_a_plan_is_made_for_the_world_that_is_not_there(tmp_path: Path, fake: Fake) -> None:
    write(tmp_path)
    words = ["16", "--model", "train.py:build", "--global-batch", "32", "--seq-len", "16"]
    done = fake(*words, "--profile", "dgx-h100", "--json", "train.py")
    assert done.returncode == 0, done.stderr
    report = FakeLaunchReport.model_validate(json.loads(done.stdout))
    assert (report.no_estimate, report.fits) == (None, True)
    assert {(rank.plan.world_size, rank.plan.global_batch_size) for rank in report.ranks if rank.plan} == {(16, 32)}


def test_a_script_of_plain_torch_is_followed_under_ddp(tmp_path: Path, launch: Launch) -> None:
    """The fake launch that starts Pythons: its rank is one."""
    (tmp_path / "train.py").write_text(PLAIN_SCRIPT, encoding="utf-8")
    done = launch("--fake", "4", "--json", "train.py", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    report = FakeLaunchReport.model_validate(json.loads(done.stdout))
    (rank,) = report.ranks
    num_parameters = 2 * 256 * 512 + 512 + 256
    assert (rank.num_parameters, rank.precision) == (num_parameters, "bf16")
    assert rank.plan is not None
    assert (rank.plan.dp, rank.plan.micro_batch_size) == (4, 512)
    assert rank.gradient_bytes >= 4 * num_parameters
    (average,) = rank.collectives  # of gradients, and of the loss
    assert (average.operation, average.group, average.count) == ("all-reduce", "dp", 2)
    assert average.total_bytes == 4 * num_parameters + 4
    assert rank.left_out == ("what torch.save writes",)
    assert not (tmp_path / "checkpoint.pt").exists()
    assert rank.host is not None
    assert rank.host.parameter_bytes == 4 * num_parameters  # where the script builds it


def test_a_script_that_shards_by_torch_itself_is_followed(tmp_path: Path, fake: Fake) -> None:
    (tmp_path / "train.py").write_text(PLAIN_SCRIPT, encoding="utf-8")
    done = fake("8", "--fake-rank", "5", "--json", "train.py", "--sharded")
    assert done.returncode == 0, done.stderr
    report = FakeLaunchReport.model_validate(json.loads(done.stdout))
    (rank,) = report.ranks
    weights, split, whole = 2 * 256 * 512, 512, 256  # the first bias is split over tp, the second is not
    assert (rank.num_parameters, rank.precision, rank.plan) == (weights + split + whole, "bf16", None)
    own = (weights + split) // 8 + whole // 4
    assert rank.optimizer_state_bytes == pytest.approx(8 * own, abs=8 * 512)
    gathered, rows = (weights + split) // 2 + whole, 512
    sent = {(one.operation, one.group): (one.count, one.total_bytes) for one in rank.collectives}
    # Each layer is gathered for its forward and its backward pass in bf16, and its gradients are reduced once in fp32.
    assert sent["all-gather", "dp"] == (4, 2 * 2 * gathered)
    assert sent["reduce-scatter", "dp"] == (2, 4 * gathered)
    assert sent["all-reduce", "tp"][1] == pytest.approx(2 * rows * 256, abs=64)  # outputs, and the norm's parts


@pytest.mark.parametrize("argument", ["--plain", "--meta"])
def test_a_gpu_is_named_by_its_number_and_a_model_is_sharded_before_it_has_values(
    argument: str, tmp_path: Path, fake: Fake
) -> None:
    """What torch's own examples of DDP and FSDP2 do: `model.to(local_rank)`, and `to_empty` after `fully_shard`."""
    (tmp_path / "train.py").write_text(IDIOMS, encoding="utf-8")
    done = fake("2", "--json", "train.py", argument)
    assert done.returncode == 0, done.stderr
    (rank,) = FakeLaunchReport.model_validate(json.loads(done.stdout)).ranks
    num_parameters = 2 * 64 * 128 + 128 + 64
    assert rank.num_parameters == num_parameters
    share = 2 if argument == "--meta" else 1
    assert rank.parameter_bytes >= 4 * num_parameters / share
    assert rank.gradient_bytes >= 4 * num_parameters / share
    assert rank.optimizer_state_bytes == pytest.approx(8 * num_parameters / share, abs=8 * 512)
    assert {one.operation for one in rank.collectives} == (
        {"all-gather", "reduce-scatter"} if argument == "--meta" else {"all-reduce"}
    )


@pytest.mark.parametrize(
    ("argument", "status", "words"),
    [
        ("--flat", 2, "train.py, line 27 shards the model by FullyShardedDataParallel, whose flat parameters --fake"),
        ("--idle", 2, "train.py ended without two steps of an optimizer"),
        ("--forgetful", 1, "RuntimeError: Expected all tensors to be on the same device"),
    ],
)
def test_a_plain_script_that_would_fail_or_not_train_is_told(
    argument: str, status: int, words: str, tmp_path: Path, fake: Fake
) -> None:
    (tmp_path / "train.py").write_text(PLAIN_SCRIPT, encoding="utf-8")
    done = fake("4", "train.py", argument)
    assert done.returncode == status
    assert words in done.stderr
    assert len(done.stderr.splitlines()) <= 8  # lines of the script alone


def test_a_script_that_fails_shows_its_own_error(tmp_path: Path, fake: Fake) -> None:
    write(tmp_path)
    done = fake("8", "--fake-rank", "1", "train.py", "--broken")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "rank 1: the learning rate is missing" in done.stderr
    assert "give --lr" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--fake", "0"], "outside 1..1024"),
        (["--fake", "2048"], "outside 1..1024"),
        (["--fake", "4", "--plan", "plan.json"], "is for 8 ranks, and --fake says 4"),
        (["--fake", "8", "--fake-rank", "8"], "--fake-rank 8 is outside a world of 8 ranks"),
        (["--fake", "8", "--nproc-per-node", "8"], "--nproc-per-node contradict each other"),
        (["--fake", "8", "--plan", "auto"], "--plan auto needs --model"),
        (["--fake", "8", "--model", "gpt2"], "--model needs --global-batch"),
        (["--fake", "8", "--seq-len", "64"], "there is no --model"),
        (
            ["--fake", "12", "--model", "gpt2", "--global-batch", "24", "--profile", "dgx-h100"],
            "--fake 12 is not a multiple of the 8 GPUs of a dgx-h100",
        ),
    ],
)
def test_a_world_that_cannot_be_is_refused_before_anything_runs(
    words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParaplanError, match=message):
        show_fake_launch(parse_arguments([*words, "train.py"], {}))


def test_the_report_says_what_a_rank_needs_sends_and_how_far_the_estimate_is_off() -> None:
    rank = FakeRankReport(
        rank=4,
        world_size=8,
        pipeline_stage=1,
        plan=PLAN,
        precision="bf16",
        num_parameters=10**6,
        parameter_bytes=2**20,
        gradient_bytes=2**20,
        optimizer_state_bytes=2**21,
        activation_bytes=2**20,
        workspace_bytes=0,
        total_bytes=5 * 2**20,
        phase="backward",
        collectives=(CountedCollective(operation="all-reduce", group="dp", num_ranks=4, count=3, total_bytes=2**20),),
        left_out=("compiling with inductor",),
    )
    estimate = StageEstimate(
        parameter_bytes=2**20,
        gradient_bytes=2**20,
        optimizer_state_bytes=2**21,
        activation_bytes=2**21,
        workspace_bytes=0,
        total_bytes=6 * 2**20,
    )
    small = FakeLaunchReport(
        script="train.py", ranks=(rank,), estimates=(estimate,), gpu_memory_bytes=2**22, profile="p"
    )
    text = render_report(small)
    assert "rank 4 of 8, pipeline stage 1 of 2" in text
    assert "5.00 MiB    6.00 MiB      +20.0%" in text
    assert "MORE than the 4.00 MiB of a GPU of p" in text
    assert "dp (4 ranks)" in text
    assert "Left out: compiling with inductor." in text
    assert max(map(len, text.splitlines())) <= 100
    assert small.fits is False


def test_an_ended_fake_launch_leaves_nothing(tmp_path: Path, start_forked: StartForked, scratch: Path) -> None:
    script, here = tmp_path / "waits.py", tmp_path / "here"
    script.write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(here)!r}).with_suffix('.new').write_text(str(os.getpid()))\n"
        f"os.replace({str(here.with_suffix('.new'))!r}, {str(here)!r})\n"
        "time.sleep(600)\n"
    )
    process = start_forked("--fake", 2, script)
    wait_until(lambda: here.exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 143
    wait_until_dead(int(here.read_text()))
    assert names_in(scratch) == []


def test_a_stream_and_recompute_in_part_run_without_the_other_ranks(tmp_path: Path, fake: Fake) -> None:
    write(tmp_path, ParallelPlan(dp=2, zero_stage=3, micro_batch_size=8), names_model=False)
    text = (tmp_path / "train.py").read_text(encoding="utf-8")
    activations = []
    whole = with_all(["runtime.RecomputePolicy()"])  # which estimates are compared with, in tests of costs
    for policy in ("None", "runtime.RecomputePolicy(keep='matmul')", *whole):
        script = text.replace("job.shard(data)", "job.shard(iter(data))")
        script = script.replace("max_grad_norm=1.0,", f"max_grad_norm=1.0, recompute={policy},")
        (tmp_path / "train.py").write_text(script, encoding="utf-8")
        done = fake("2", "--fake-rank", "1", "--plan", "plan.json", "--json", "train.py")
        assert done.returncode == 0, done.stderr
        (rank,) = FakeLaunchReport.model_validate(json.loads(done.stdout)).ranks
        activations.append(rank.activation_bytes)
    assert all(more > less for more, less in itertools.pairwise(activations)), activations
