"""Predicted steps as traces, the reading of traces, and what is summed from them."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from paraplan.cli.main import app
from paraplan.errors import PlanError
from paraplan.report.step_profile import length, measured_profile, overlap, predicted_profile, union
from paraplan.report.trace_comparison import compare_steps
from paraplan.report.trace_reading import read_trace

PIPELINE = ["gpt2", "--profile", "dgx-h100", "--seq-len", "1024", "--global-batch", "64", "--dp", "2", "--pp", "4"]
Spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def event(name: str, category: str, start_us: float, length_us: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 1, "tid": 1, "name": name, "cat": category, "ts": start_us, "dur": length_us} | more


def measured(*events: dict[str, Any], **head: Any) -> bytes:
    return json.dumps({"traceEvents": list(events)} | head).encode()


def predicted(tmp_path: Path, *options: str) -> tuple[Path, dict[str, Any]]:
    path = tmp_path / "predicted.json"
    result = CliRunner().invoke(app, ["estimate", *PIPELINE, *options, "--trace", str(path), "--json"])
    assert result.exit_code == 0, result.stderr
    return path, json.loads(result.stdout)


def test_every_pipeline_rank_has_named_tracks_and_all_its_operations(tmp_path: Path) -> None:
    path, _ = predicted(tmp_path)
    trace = json.loads(path.read_text())
    named = [each for each in trace["traceEvents"] if each["ph"] == "M" and each["name"] == "process_name"]
    assert [each["args"]["name"] for each in named] == [f"rank {2 * rank}: stage {rank}" for rank in range(4)]
    for rank in range(4):
        mine = [each for each in trace["traceEvents"] if each["ph"] == "X" and each["pid"] == rank]
        for kind in ("forward", "backward"):
            found = [each["args"]["micro_batch"] for each in mine if each["cat"] == kind]
            assert sorted(found) == list(range(32))
        assert [each["name"] for each in mine if each["cat"] == "optimizer"] == ["optimizer step"]
        assert {each["args"]["axis"] for each in mine if each["cat"] == "communication"} == {"dp", "pp"}


def test_events_of_a_track_do_not_overlap_and_end_with_the_step(tmp_path: Path) -> None:
    path, report = predicted(tmp_path, "--zero", "1", "--schedule", "zero_bubble")
    events = [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]
    assert max(each["ts"] + each["dur"] for each in events) / 1e6 == pytest.approx(report["step"]["step_time_s"])
    assert {"forward", "backward", "weight", "communication", "optimizer"} == {each["cat"] for each in events}
    for track in {(each["pid"], each["tid"]) for each in events}:
        spans = sorted((each["ts"], each["ts"] + each["dur"]) for each in events if (each["pid"], each["tid"]) == track)
        assert all(later[0] >= earlier[1] - 0.01 for earlier, later in pairwise(spans))


def test_a_packed_trace_reads_the_same(tmp_path: Path) -> None:
    path, _ = predicted(tmp_path)
    packed = tmp_path / "predicted.json.gz"
    assert CliRunner().invoke(app, ["estimate", *PIPELINE, "--trace", str(packed)]).exit_code == 0
    assert gzip.decompress(packed.read_bytes()) == path.read_bytes()
    assert read_trace(packed.read_bytes(), source="a").events == read_trace(path.read_bytes(), source="a").events


def test_a_predicted_step_sums_to_the_estimate_on_every_rank(tmp_path: Path) -> None:
    path, report = predicted(tmp_path)
    step = report["step"]
    trace = read_trace(path.read_bytes(), source="predicted.json")
    for rank in range(8):
        profile = predicted_profile(trace, rank=rank)
        assert profile.compute_s + profile.exposed_s + profile.idle_s == pytest.approx(step["step_time_s"])
        assert profile.optimizer_s == pytest.approx(step["optimizer_s"], abs=1e-8)
        assert set(profile.communication_s) == {"all_reduce", "send_recv"}
    idle = [predicted_profile(trace, rank=2 * rank).idle_s for rank in range(4)]
    assert max(idle) > step["pipeline_bubble_s"] * 0.9


def test_a_recommendation_writes_its_step_too(tmp_path: Path) -> None:
    path = tmp_path / "predicted.json"
    words = ["recommend", "gpt2", "--profile", "rtx-3090-x2", "--seq-len", "1024", "--global-batch", "64"]
    result = CliRunner().invoke(app, [*words, "--trace", str(path), "--json"])
    assert result.exit_code == 0
    own = json.loads(path.read_text())["paraplan"]
    assert own["plan"] == json.loads(result.stdout)["plan"]


def test_kernels_are_compute_and_those_of_nccl_are_communication() -> None:
    trace = measured(
        event("ProfilerStep#7", "gpu_user_annotation", 0, 100),
        event("ProfilerStep#8", "gpu_user_annotation", 100, 100),
        event("ampere_gemm", "kernel", 0, 60),
        event("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "kernel", 40, 40),
        event("ncclDevKernel_SendRecv", "kernel", 120, 10),
        event("ncclDevKernel_SendRecv", "kernel", 140, 10, args={"Collective name": "all_to_allv"}),
        event("Memcpy DtoD", "gpu_memcpy", 150, 30),
        event("aten::mm", "cpu_op", 0, 200),
        event("Optimizer.step#AdamW.step", "gpu_user_annotation", 170, 20),
        distributedInfo={"rank": 3, "world_size": 8},
    )
    profile = measured_profile(read_trace(trace, source="rank3.json"))
    assert (profile.rank, profile.world_size, profile.steps, profile.on_gpu) == (3, 8, 2, True)
    assert profile.step_s == pytest.approx(100e-6)
    assert profile.compute_s == pytest.approx(45e-6)
    assert profile.exposed_s == pytest.approx(20e-6)
    assert profile.idle_s == pytest.approx(35e-6)
    assert profile.optimizer_s == pytest.approx(5e-6)
    assert profile.communication_s == pytest.approx({"all_reduce": 20e-6, "all_to_all": 5e-6, "send_recv": 5e-6})


# A step of FSDP with three streams as torch.profiler exports it from CUDA, in microseconds: category, name, stream,
# start, length, and what Kineto adds to kernels of NCCL. Written by hand in the shape of pytorch/pytorch#131462 and of
# Kineto's sources (activity types; GpuUserEventMap, which makes a mark for each stream).
CUDA_STEP = [
    ("user_annotation", "ProfilerStep#{step}", None, 0, 90, {}),
    ("cpu_op", "aten::mm", None, 1, 80, {}),
    ("cpu_op", "c10d::_allgather_base_", None, 1, 3, {}),
    ("cuda_runtime", "cudaLaunchKernel", None, 2, 5, {}),
    ("overhead", "Activity Buffer Request", None, 2, 50, {}),
    ("ac2g", "ac2g", 7, 10, 0, {}),
    ("gpu_user_annotation", "ProfilerStep#{step}", 7, 12, 86, {}),
    ("gpu_user_annotation", "ProfilerStep#{step}", 20, 10, 60, {}),
    ("gpu_user_annotation", "ProfilerStep#{step}", 24, 0, 2, {}),
    ("gpu_user_annotation", "nccl:_all_gather_base", 20, 10, 20, {}),
    ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 24, 0, 2, {}),
    (
        "kernel",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        20,
        10,
        20,
        {"Collective name": "_allgather_base", "Group size": 8, "dtype": "BFloat16", "Process Group Name": "0"},
    ),
    ("kernel", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN", 7, 12, 20, {}),
    ("kernel", "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...> > >(...)", 7, 32, 10, {}),
    ("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas", 7, 42, 18, {}),
    ("kernel", "ncclSymkDevKernel_ReduceScatter_LDMC_sum_bf16", 20, 50, 20, {}),  # named by NCCL alone
    ("gpu_user_annotation", "Optimizer.step#AdamW.step", 7, 80, 18, {}),
    ("kernel", "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<...>(...)", 7, 80, 18, {}),
]


def cuda_events(*, steps: int) -> list[dict[str, Any]]:
    return [
        event(
            name.format(step=3 + step),
            category,
            100 * step + start,
            length_us,
            pid=4711 if stream is None else 0,
            tid=4711 if stream is None else stream,
            args=more | ({} if stream is None else {"stream": stream, "device": 0}),
        )
        for step in range(steps)
        for category, name, stream, start, length_us, more in CUDA_STEP
    ]


@pytest.mark.parametrize("form", ["plain", "packed", "list"])
def test_steps_of_several_cuda_streams_are_counted_once(form: str) -> None:
    events = cuda_events(steps=2)
    data = json.dumps(events).encode() if form == "list" else measured(*events, distributedInfo={"rank": 5})
    profile = measured_profile(read_trace(gzip.compress(data) if form == "packed" else data, source="rank5.json.gz"))
    assert (profile.steps, profile.on_gpu, profile.rank) == (2, True, None if form == "list" else 5)
    # From the copy at 0 to the optimizer's end at 198; computing 2 + 48 + 18 of each 100, sending 10-30 and 50-70.
    assert profile.step_s == pytest.approx(99e-6)
    assert profile.compute_s == pytest.approx(68e-6)
    assert profile.exposed_s == pytest.approx(12e-6)
    assert profile.optimizer_s == pytest.approx(18e-6)
    assert profile.communication_s == pytest.approx({"all_gather": 20e-6, "reduce_scatter": 20e-6})
    assert profile.compute_s + profile.exposed_s + profile.idle_s == pytest.approx(profile.step_s)


def test_without_marks_the_steps_are_those_that_the_user_counts() -> None:
    trace = measured(event("aten::mm", "cpu_op", 0, 300), event("gloo:send", "user_annotation", 300, 100))
    profile = measured_profile(read_trace(trace, source="a"), steps=4)
    assert profile.step_s == pytest.approx(100e-6)
    assert profile.communication_s == pytest.approx({"send_recv": 25e-6})


def test_the_largest_difference_is_named_first(tmp_path: Path) -> None:
    path, report = predicted(tmp_path)
    step_us = report["step"]["step_time_s"] * 1e6
    trace = measured(
        event("ProfilerStep#0", "gpu_user_annotation", 0, 3 * step_us),
        event("gemm", "kernel", 0, 2.5 * step_us),
        event("ncclDevKernel_ReduceScatter_Sum_f32", "kernel", 2.5 * step_us, 0.4 * step_us),
    )
    found = compare_steps(
        predicted_profile(read_trace(path.read_bytes(), source="a"), rank=0),
        measured_profile(read_trace(trace, source="b")),
    )
    assert found.findings[0].startswith("compute: ")
    assert "longer than predicted" in found.findings[0]
    assert any("not predicted at all: reduce-scatter" in finding for finding in found.findings)
    assert any("predicted and not in the run: all-reduce" in finding for finding in found.findings)
    assert sum(part.difference_s for part in found.parts) == pytest.approx(2 * report["step"]["step_time_s"])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is no JSON"),
        (b'{"traceEvents": [', "is no JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"events": []}', "no list traceEvents"),
        (b"7", "no list traceEvents"),
        (b'{"traceEvents": []}', "no events with a duration"),
        (b'{"traceEvents": [{"ph": "X", "ts": "soon", "dur": 1}, 5, null]}', "no events with a duration"),
        (gzip.compress(b'{"traceEvents": []}')[:-9], "damaged or cut off"),
    ],
    ids=range(8),
)
def test_a_broken_trace_is_an_error_that_names_it(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    result = CliRunner().invoke(app, ["compare", str(path), str(path)])
    assert result.exit_code == 2
    assert "broken.json" in result.stderr
    assert words in result.stderr
    assert "hint: " in result.stderr


def test_wrong_files_and_ranks_are_errors(tmp_path: Path) -> None:
    ours, _ = predicted(tmp_path)
    theirs = tmp_path / "run.json"
    theirs.write_bytes(measured(event("aten::mm", "cpu_op", 0, 300)))
    for words, said in (
        (["compare", str(theirs), str(ours)], "is no prediction of paraplan"),
        (["compare", str(ours), str(ours)], "is a prediction too"),
        (["compare", str(ours), str(theirs), "--rank", "8"], "rank 8 is outside a world of 8"),
        (["compare", str(ours), str(tmp_path / "missing.json")], "cannot read the trace"),
        (["estimate", *PIPELINE, "--trace", str(tmp_path / "missing" / "a.json")], "cannot write"),
    ):
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 2, words
        assert said in result.stderr


def test_a_prediction_whose_plan_is_broken_names_the_field(tmp_path: Path) -> None:
    path, _ = predicted(tmp_path)
    trace = json.loads(path.read_text())
    trace["paraplan"]["plan"]["tp"] = "many"
    with pytest.raises(PlanError, match=r"paraplan\.plan\.tp"):
        read_trace(json.dumps(trace).encode(), source="a.json")


@given(Spans, Spans)
def test_spans_cover_what_their_points_do(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    def points(spans: list[tuple[int, int]]) -> set[int]:
        return {point for start, end in spans for point in range(start, end)}

    first, second = union(left), union(right)
    assert length(first) == len(points(left))
    assert length(overlap(first, second)) == len(points(left) & points(right))
