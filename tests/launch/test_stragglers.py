"""Slow ranks of real jobs are named while they run, without a line of code in the script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launching import ForkedLaunch, StartForked, WriteScript, read_until
from waiting import PATIENCE_S

from paraplan.launch.ranks.bootstrap import MARKS_VARIABLE
from paraplan.launch.ranks.step_marks import MARKS_FILE

pytestmark = pytest.mark.ranks

TRAIN = """
    import sys, time
    from statistics import median
    import torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    fault, steps = sys.argv[1], int(sys.argv[2])
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    class Batches(Dataset):
        def __len__(self):
            return 1 << 20
        def __getitem__(self, index):
            if fault == "loader" and rank == 1 and index % 8 == 0:
                # Far more than what a busy machine takes from most steps; one stall makes no four steps longer.
                time.sleep(min(2.0, max(0.25, 2 * median(others))) if others else 0.25)
            return torch.randn(32)

    model = nn.parallel.DistributedDataParallel(nn.Linear(32, 32))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = iter(DataLoader(Batches(), batch_size=8))
    others = []
    for step in range(steps):
        batch = next(batches)
        others, began = others[-4:], time.monotonic()
        time.sleep(0.05 if fault != "wait" or rank == 0 else 0.3)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        others.append(time.monotonic() - began)
    dist.destroy_process_group()
    """


@pytest.mark.parametrize("options", [(), pytest.param(("--start-method", "exec"), marks=pytest.mark.with_all)])
def test_a_rank_with_a_slow_data_loader_is_named_while_it_runs_and_at_the_end(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = launch_forked("--log-dir", "run", "--nproc-per-node", 2, *options, script(TRAIN), "loader", 36)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "slower in its data loader since step" in line]
    assert len(lines) == 2, done.stderr
    assert lines[0].startswith("paraplan: rank 1 (")
    assert "it costs the job" in lines[0]
    assert lines[1].startswith(lines[0])
    (case,) = json.loads((tmp_path / "run" / "run.json").read_text())["late"]
    assert (case["kind"], case["ranks"], case["part"]) == ("rank", [1], "loader")
    assert case["said_at_step"] - case["since_step"] <= 30
    assert not list(tmp_path.rglob(MARKS_FILE))


def test_what_a_script_waits_for_by_itself_is_told_from_its_loader(
    launch_forked: ForkedLaunch, script: WriteScript
) -> None:
    done = launch_forked("--watch-steps", "--no-logs", "--nproc-per-node", 2, script(TRAIN), "wait", 36)
    assert "rank 1 (" in done.stderr, done.stderr
    assert "waits for outside of collectives" in done.stderr


def test_equal_ranks_are_not_named(launch_forked: ForkedLaunch, script: WriteScript) -> None:
    done = launch_forked("--watch-steps", "--no-logs", "--nproc-per-node", 2, script(TRAIN), "none", 30)
    assert done.returncode == 0
    assert "since step" not in done.stderr


@pytest.mark.parametrize(
    ("imports", "options", "is_watched"),
    [
        ("torch", ("--watch-steps",), True),
        pytest.param("torch", ("--hang-timeout", 60), True, marks=pytest.mark.with_all),
        ("paraplan.runtime.engine", (), True),
        ("paraplan.runtime.engine", ("--no-straggler-watch",), False),
    ],
)
def test_backward_is_replaced_in_scripts_of_the_runtime_and_where_somebody_asks(
    imports: str,
    options: tuple[object, ...],
    is_watched: bool,
    launch_forked: ForkedLaunch,
    script: WriteScript,
) -> None:
    """A rank sees what it sees under torchrun elsewhere: it says whether backward is torch's."""
    shows = f"import {imports}, torch; print('step_hooks' in torch.autograd.backward.__code__.co_filename)"
    done = launch_forked("--no-logs", "--nproc-per-node", 2, *options, script(shows))
    said = (done.stdout.count(str(is_watched)), done.stdout.count(str(not is_watched)))  # lines may run together
    assert said == (2, 0), done.stderr


def test_time_in_collectives_is_kept_for_every_way_to_wait(
    launch_forked: ForkedLaunch, script: WriteScript, tmp_path: Path
) -> None:
    path = script(
        """
        import json, os, time
        import torch, torch.distributed as dist
        from pathlib import Path
        from torch import nn
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor, Partial, Replicate
        from paraplan.launch.stragglers.steps import StepReader

        dist.init_process_group("gloo")
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (2,))
        late = lambda: time.sleep(0.5 if rank == 1 else 0)
        parameter = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        fully_shard(sharded)
        replicated = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
        partial = DTensor.from_local(torch.ones(4), mesh, [Partial()])

        def all_reduce():
            dist.all_reduce(torch.ones(4))
        def asynchronous():
            dist.all_reduce(torch.ones(4), async_op=True).wait()
        def barrier():
            dist.barrier()
        def tensors():
            (partial.redistribute(placements=[Replicate()]).to_local() + 1).sum()
        def in_ddp():
            replicated(torch.ones(2, 8)).sum().backward()
        def in_fsdp():
            sharded(torch.ones(2, 8)).sum().backward()

        for work in (all_reduce, asynchronous, barrier, tensors, in_ddp, in_fsdp):
            parameter.sum().backward()
            time.sleep(0.05)  # after a short step waits are too dear to look at the run queue in each
            optimizer.step()
            parameter.sum().backward()  # the step before ends here
            late()
            work()
            optimizer.step()
        parameter.sum().backward()
        folder = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent
        steps = StepReader(folder).read()
        Path(f"own{rank}.json").write_text(json.dumps([step.own_s for step in steps[1::2]]))  # in between: the rest
        dist.destroy_process_group()
        """
    )
    done = launch_forked("--nproc-per-node", 2, "--watch-steps", path)
    assert done.returncode == 0, done.stderr
    early, late = (json.loads((tmp_path / f"own{rank}.json").read_text()) for rank in (0, 1))
    assert len(early) == len(late) == 6
    # 0.5 s but for what a busy machine adds; without marks of a wait both would be equal
    assert all(one > other + 0.1 for one, other in zip(late, early, strict=True)), (early, late)


# Of forked ranks the tests around this one say what they see.
@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.with_all), ("--start-method", "exec")])
def test_hooks_change_nothing_of_what_torch_says_and_stand_where_torch_is_only_looked_for_first(
    launch_forked: ForkedLaunch, script: WriteScript, options: tuple[str, ...]
) -> None:
    path = script(
        """
        import importlib.util
        assert importlib.util.find_spec("torch")  # as transformers does
        import torch
        print(torch.autograd.backward.__code__.co_filename.endswith("step_hooks.py"))
        print(torch.autograd.backward([]))
        try:
            torch.autograd.backward(None)
        except TypeError as error:
            print(error)
        """
    )
    done = launch_forked("--no-logs", *options, path, **{MARKS_VARIABLE: "torch"})
    assert done.stdout.splitlines() == ["True", "None", "'NoneType' object is not iterable"], done.stderr


@pytest.mark.parametrize(
    "options",
    [(), pytest.param(("--start-method", "exec"), marks=pytest.mark.with_all)],  # above hooks are set there too
)
def test_an_error_has_no_frame_of_the_launcher_where_hooks_stand_around_torch(
    tmp_path: Path, launch_forked: ForkedLaunch, script: WriteScript, options: tuple[str, ...]
) -> None:
    path = script(
        """
        import torch
        def train():
            try:
                torch.ones(2, requires_grad=True).sin().backward()
            except RuntimeError as error:
                raise ValueError("no step") from error
        train()
        """
    )
    done = launch_forked(*options, path, **{MARKS_VARIABLE: "torch"})
    (record,) = tmp_path.glob("paraplan-runs/*/*/*/*/error.json")
    traceback = json.loads(record.read_text())["message"]["extraInfo"]["py_callstack"]
    for text in (done.stderr, traceback):
        assert "grad can be implicitly created only for scalar outputs" in text
        assert "in _make_grads" in text
        assert "ValueError: no step" in text
        assert "paraplan/launch" not in text


@pytest.mark.with_all  # a collective stays in the graph, below
def test_compiled_training_is_left_as_it_is(launch_forked: ForkedLaunch, script: WriteScript) -> None:
    path = script(
        """
        import torch
        parameter = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=0.01)
        batches = iter(torch.utils.data.DataLoader(range(100)))

        @torch.compile(backend="eager")
        def train():
            loss = (parameter * next(batches)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        for _ in range(6):
            train()
        from torch._dynamo.utils import counters
        print(counters["stats"]["unique_graphs"], "step_marks" in str(counters))
        """
    )
    plain = launch_forked("--no-logs", path)
    marked = launch_forked("--no-logs", path, **{MARKS_VARIABLE: "torch"})
    assert plain.returncode == marked.returncode == 0, marked.stderr
    assert marked.stdout == plain.stdout
    assert "step_marks" not in marked.stderr


def test_a_collective_stays_in_the_graph_of_what_is_compiled(launch_forked: ForkedLaunch, script: WriteScript) -> None:
    path = script(
        """
        import sys
        import torch, torch.distributed as dist
        import torch.distributed._functional_collectives as functional
        from torch._dynamo.utils import counters

        dist.init_process_group("gloo")
        model = torch.nn.Linear(4, 4)
        replica = torch.nn.parallel.DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.ones(2, 4)

        def train(inputs):
            loss = replica(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        @torch.no_grad()
        def reduce(inputs):
            loss = model(inputs).square().mean()
            dist.all_reduce(loss)
            return loss / 2

        @torch.no_grad()
        def gather(inputs):
            outputs = torch.empty(2, 4)
            dist.all_gather_into_tensor(outputs, model(inputs))
            return outputs.sum()

        @torch.no_grad()
        def functional_reduce(inputs):
            return functional.all_reduce(model(inputs), "sum", dist.group.WORLD).sum()

        for _ in range(2):
            train(inputs)  # an eager step before: where marks begin
        for code in [eval(name) for name in sys.argv[1:]]:
            torch._dynamo.reset()
            counters.clear()
            torch.compile(code, backend="eager", fullgraph=code is not train)(inputs)
            graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
            print(code.__name__, graphs, breaks, flush=True)
        dist.destroy_process_group()
        """
    )
    names = ("reduce", "gather", "functional_reduce", "train")
    marked = launch_forked("--no-logs", path, *names, **{MARKS_VARIABLE: "torch"})
    plain = launch_forked("--no-logs", path, names[-1])
    assert marked.returncode == plain.returncode == 0, marked.stderr
    assert marked.stdout.splitlines()[:3] == ["reduce 1 0", "gather 1 0", "functional_reduce 1 0"]
    assert marked.stdout.splitlines()[3:] == plain.stdout.splitlines(), "nor is another break in what has some"


def test_a_ring_of_nonsense_ends_no_job(start_forked: StartForked, script: WriteScript, tmp_path: Path) -> None:
    path = script(
        """
        import os, time
        from pathlib import Path
        import torch
        from paraplan.launch.ranks import step_marks
        ring = Path(os.environ["TORCHELASTIC_ERROR_FILE"]).parent / step_marks.MARKS_FILE
        head = step_marks.HEADER.pack(step_marks.MAGIC, os.getpid(), 5).ljust(step_marks.RECORDS_AT, b"\\0")
        numbers = [float("nan")] * len(step_marks.FIELDS)
        records = [step_marks.RECORD.pack(index + 1, *numbers) for index in range(step_marks.CAPACITY)]
        ring.write_bytes(head + b"".join(records))
        while not os.path.exists("said"):
            time.sleep(0.02)
        os.write(1, b"trained\\n")
        """
    )
    job = start_forked("--no-logs", "--watch-steps", "--nproc-per-node", 2, path)
    assert job.stderr is not None
    read_until(job.stderr, lambda said: "slow ranks are looked for no more: ValueError" in said)
    (tmp_path / "said").touch()
    stdout, stderr = job.communicate(PATIENCE_S)
    assert (job.returncode, stdout.split()) == (0, ["trained"] * 2), stderr
