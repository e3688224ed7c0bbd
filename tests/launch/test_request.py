from __future__ import annotations

from pathlib import Path

import pytest

from paraplan.errors import NoGpuError, PlanError
from paraplan.hardware.topology import Gpu
from paraplan.launch.parser import parse_arguments
from paraplan.launch.planning import PlannerRequest
from paraplan.launch.request import LaunchRequest, check_request, likely_ranks_per_node
from paraplan.launch.spec import ArgumentError, LaunchSpec, NodeRange
from paraplan.plan.files import ClusterReference, ModelReference, PlanFile, PlannedPlacement
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec


def write_plan(folder: Path, *, nodes: int | None = None, gpus_per_node: int = 0, **degrees: int) -> str:
    cluster = ClusterReference(name="test", num_nodes=nodes, gpus_per_node=gpus_per_node) if nodes else None
    (folder / "plan.json").write_text(PlanFile(plan=ParallelPlan(**degrees), cluster=cluster).to_json())
    return "plan.json"


@pytest.fixture
def check(tmp_path: Path):
    (tmp_path / "train.py").write_text("")

    def run(*, num_gpus: int = 0, nnodes: str | None = None, **changes: object) -> LaunchRequest:
        nodes = None if nnodes is None else NodeRange.parse(nnodes)
        spec = LaunchSpec(**({"training_script": "train.py", "nodes": nodes} | changes))  # type: ignore[arg-type]
        return check_request(spec, num_gpus=num_gpus, current_folder=tmp_path)

    return run


@pytest.mark.parametrize(("num_gpus", "ranks"), [(0, "1"), (8, "8")])
def test_without_a_plan_there_is_a_rank_for_each_gpu_and_one_on_a_cpu(check, num_gpus: int, ranks: str) -> None:
    request = check(num_gpus=num_gpus)
    assert (request.nodes, request.nproc_per_node) == (NodeRange(1, 1), ranks)


def test_a_plan_sets_nodes_and_ranks_as_it_was_made(check, tmp_path: Path) -> None:
    request = check(plan=write_plan(tmp_path, nodes=2, gpus_per_node=4, dp=8))
    assert (request.nodes, request.nproc_per_node) == (NodeRange(2, 2), "4")
    assert request.plan_path == str(tmp_path / "plan.json")
    assert request.plan == ParallelPlan(dp=8)


def test_a_plan_that_names_no_machines_runs_on_one_node(check, tmp_path: Path) -> None:
    request = check(plan=write_plan(tmp_path, dp=3))
    assert (request.nodes, request.nproc_per_node) == (NodeRange(1, 1), "3")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"nnodes": "4"}, (4, "2")),
        ({"nproc_per_node": "8"}, (1, "8")),
        ({"nproc_per_node": "4"}, (2, "4")),
        ({"nproc_per_node": "gpu"}, (2, "4")),
        ({"nnodes": "1", "nproc_per_node": "8"}, (1, "8")),
    ],
)
def test_given_numbers_are_kept_and_the_plan_fills_in_the_other(
    check, tmp_path: Path, given: dict[str, str], expected: tuple[int, str]
) -> None:
    request = check(plan=write_plan(tmp_path, nodes=2, gpus_per_node=4, dp=8), num_gpus=4, **given)
    assert (request.nodes.max, request.nproc_per_node) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"nproc_per_node": "3"},
        {"nproc_per_node": "4"},
        {"nnodes": "3"},
        {"nnodes": "2", "nproc_per_node": "2"},
        {"nnodes": "1:3"},
        {"nproc_per_node": "16"},
    ],
)
def test_numbers_that_make_another_world_than_the_plans_are_refused(
    check, tmp_path: Path, given: dict[str, str]
) -> None:
    with pytest.raises(PlanError, match="is for 8 ranks, but"):
        check(plan=write_plan(tmp_path, dp=8), **given)


@pytest.mark.parametrize("text", ["{", "[]", '{"plan": {"dp": 0}}', '{"plan": {"dp": 2, "bogus": 1}}'])
def test_a_broken_plan_is_refused_with_its_name(check, tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.json").write_text(text)
    with pytest.raises(PlanError, match=r"bad\.json"):
        check(plan="bad.json")


def test_a_plan_that_is_not_there_or_is_a_folder_is_refused(check, tmp_path: Path) -> None:
    for name in ("none.json", "."):
        with pytest.raises(PlanError, match="cannot be read"):
            check(plan=name)


@pytest.mark.parametrize(
    "given",
    [
        {"nproc_per_node": "0"},
        {"nproc_per_node": "-2"},
        {"nproc_per_node": "2.5"},
        {"nproc_per_node": "gpu"},
        {"nnodes": "0"},
        {"nnodes": "two"},
        {"nnodes": "2:1"},
        {"nnodes": "1:2:3"},
        {"max_restarts": -1},
        {"redirects": "4"},
        {"tee": "0:9"},
        {"training_script": "trian.py"},
        {"training_script": "no.such.module", "module": True},
        {"training_script": "no-such-program", "no_python": True},
        {"training_script": "json", "no_python": True, "module": True},
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_with_something_to_do(check, given: dict[str, object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        check(**given)
    assert caught.value.hint
    assert isinstance(caught.value, ValueError)


def test_a_module_is_found_in_the_current_folder_and_in_the_library(check) -> None:
    assert [check(training_script=name, module=True).spec.module for name in ("train", "json.tool", "sys")]


def test_a_missing_script_is_answered_with_the_scripts_that_are_there(check) -> None:
    with pytest.raises(ArgumentError) as caught:
        check(training_script="trian.py")
    assert "train.py" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("arguments", "environment", "ranks"),
    [
        (["--nproc-per-node", "4", "train.py"], {}, 4),
        (["--nproc_per_node=4", "train.py"], {}, 4),
        (["train.py"], {"PET_NPROC_PER_NODE": "3"}, 3),
        (["--nproc-per-node", "gpu", "train.py"], {}, None),
        (["train.py"], {}, None),
        (["--plan", "nowhere.json", "train.py"], {}, None),
        (["--plan", "auto", "train.py", "--nproc-per-node", "4"], {}, None),
    ],
)
def test_the_ranks_of_a_node_are_known_early_where_the_command_line_says_them(
    arguments: list[str], environment: dict[str, str], ranks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert likely_ranks_per_node(parse_arguments(arguments, environment)) == ranks


def test_the_ranks_of_a_node_are_known_early_from_the_plan(tmp_path: Path) -> None:
    name = write_plan(tmp_path, nodes=2, gpus_per_node=4, dp=8)
    assert likely_ranks_per_node(parse_arguments(["--plan", str(tmp_path / name), "train.py"], {})) == 4


EIGHT_GPUS = [Gpu(index=index, uuid=f"GPU-{index}abc") for index in range(8)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [("2", ("GPU-0abc", "GPU-1abc")), ("2,0", ("GPU-2abc", "GPU-0abc")), ("GPU-7", ("GPU-7abc",))],
)
def test_gpus_are_chosen_as_paraplan_topo_chooses_them(tmp_path: Path, words: str, expected: tuple[str, ...]) -> None:
    (tmp_path / "train.py").touch()
    arguments = parse_arguments(["--gpus", words, "train.py"], {})
    request = check_request(
        arguments, num_gpus=8, current_folder=tmp_path, read_gpus=lambda: EIGHT_GPUS, environment={}
    )
    assert request.gpus == expected
    assert request.nproc_per_node == str(len(expected))


def test_visible_devices_of_the_user_limit_the_choice(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    arguments = parse_arguments(["--gpus", "1,", "train.py"], {})
    environment = {"CUDA_VISIBLE_DEVICES": "5,3"}
    request = check_request(
        arguments, num_gpus=2, current_folder=tmp_path, read_gpus=lambda: EIGHT_GPUS, environment=environment
    )
    assert request.gpus == ("GPU-3abc",)


@pytest.mark.parametrize(
    ("planned", "expected"),
    [((5, 6), ("GPU-5abc", "GPU-6abc")), ((1, 0), None), ((0, 1), None), ((7, 8), None)],
)
def test_a_plan_for_some_kinds_of_gpu_gets_those_that_it_names(
    tmp_path: Path, planned: tuple[int, ...], expected: tuple[str, ...] | None
) -> None:
    (tmp_path / "train.py").touch()
    placement = PlannedPlacement(local_gpus=planned, slowest_bytes_per_s={})
    path = tmp_path / "plan.json"
    path.write_text(PlanFile(plan=ParallelPlan(dp=2), placement=placement).to_json())
    spec = parse_arguments(["--plan", "plan.json", "train.py"], {})
    request = check_request(spec, num_gpus=8, current_folder=tmp_path, read_gpus=lambda: EIGHT_GPUS, environment={})
    assert request.gpus == expected
    assert request.nproc_per_node == "2"


def test_gpus_on_a_machine_without_any_are_an_error(tmp_path: Path) -> None:
    def no_driver() -> list[Gpu]:
        raise NoGpuError("no NVIDIA driver on this machine")

    (tmp_path / "train.py").touch()
    arguments = parse_arguments(["--gpus", "0", "train.py"], {})
    with pytest.raises(ArgumentError, match="--gpus 0: no NVIDIA driver"):
        check_request(arguments, num_gpus=0, current_folder=tmp_path, read_gpus=no_driver, environment={})


def test_a_model_is_planned_for_and_the_training_options_reach_the_planner(check) -> None:
    request = check(model="gpt2", plan="auto", global_batch=64, seq_len=None, precision="fp32", num_gpus=8)
    assert request.planner == PlannerRequest("gpt2", {"global_batch_size": 64, "precision": "fp32"}, profile=None)
    assert request.plan is None
    assert check(model="gpt2", global_batch=64, num_gpus=0).planner.profile == "cpu"
    assert check(model="gpt2", global_batch=64, profile="dgx-h100").planner.profile == "dgx-h100"


def test_an_automatic_plan_without_a_model_is_left_to_the_script(check) -> None:
    request = check(plan="auto", nproc_per_node="2")
    assert (request.planner, request.plan, request.plan_path) == (None, None, None)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"model": "gpt2"}, "--model needs --global-batch"),
        ({"model": "gpt2", "global_batch": 8, "plan": "plan.json"}, "contradict each other"),
        ({"global_batch": 8}, "there is no --model"),
    ],
)
def test_a_model_that_is_half_described_is_refused(check, given: dict[str, object], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        check(**given)


def test_an_endpoint_of_several_hosts_is_refused() -> None:
    where = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "a:1,b:1"]
    with pytest.raises(ArgumentError, match="a:1,b:1 names several hosts, and the nodes of a job meet at one"):
        check_request(parse_arguments([*where, __file__], {}), num_gpus=0, current_folder=Path())


@pytest.mark.parametrize(
    ("conf", "option"), [("min_nodes=1,timeout=3", "--nnodes"), ("timeout=3, run_id=a", "--rdzv-id")]
)
def test_what_an_option_says_is_not_for_the_configuration_of_the_rendezvous(check, conf: str, option: str) -> None:
    with pytest.raises(ArgumentError, match=f"is what {option} says"):
        check(rdzv_conf=conf)


def test_a_plan_for_other_machines_is_made_again_for_those_that_are_here(check, tmp_path: Path) -> None:
    machines = ClusterReference(name="test", num_nodes=2, gpus_per_node=2)
    model, training = ModelReference(name="gpt2"), TrainingSpec(global_batch_size=8, seq_length=128)
    file = PlanFile(plan=ParallelPlan(dp=4), cluster=machines, model=model, training=training)
    (tmp_path / "plan.json").write_text(file.to_json())
    same = check(plan="auto:plan.json")
    assert (same.nodes, same.nproc_per_node, same.planned_again) == (NodeRange(2, 2), "2", None)
    assert same.plan == ParallelPlan(dp=4)
    fewer = check(plan="auto:plan.json", nnodes="1")
    assert (fewer.nodes, fewer.nproc_per_node, fewer.file, fewer.plan_path) == (NodeRange(1, 1), "2", None, None)
    assert fewer.planned_again == "the plan is for 2 x 2 ranks, and here are 1 x 2 ranks: planning again"
    assert fewer.planner is not None
    assert (fewer.planner.model, fewer.planner.profile) == ("gpt2", "cpu")
    assert [fewer.planner.training[name] for name in ("global_batch_size", "seq_length")] == [8, 128]
    assert check(plan="auto:plan.json", nnodes="1", nproc_per_node="4").plan == ParallelPlan(dp=4)
    with pytest.raises(PlanError, match="does not say which model it trains"):
        check(plan=f"auto:{write_plan(tmp_path, dp=2)}")
