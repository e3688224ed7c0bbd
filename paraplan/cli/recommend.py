"""`paraplan recommend`: the decision tree and the search, as a ranked table and a plan file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from paraplan.api.machines import load_cluster
from paraplan.api.models import load_model
from paraplan.api.plans import load_plan
from paraplan.api.recommendations import Constraints, SearchRequest
from paraplan.api.workloads import OWN_RUNTIME, Workload, training_of
from paraplan.cli.ci import CheckOption, GithubOption, JunitOption, ToleranceOption, require_checks
from paraplan.cli.ci_plan import check_plan_file, refuse_beside_check
from paraplan.cli.html import MANY_KINDS, HtmlOption, recommended, require_files, write_files
from paraplan.cli.inputs import calibrated, require_batch
from paraplan.cli.options import (
    MOST_SEQUENCES,
    SEARCH_PANEL,
    TRAINING_PANEL,
    AttentionName,
    AttentionOption,
    CalibrationOption,
    CompileOption,
    FindName,
    FixedCpOption,
    FixedDpOption,
    FixedEpOption,
    FixedMicroBatchOption,
    FixedOffloadOption,
    FixedPpOption,
    FixedRecomputeOption,
    FixedScheduleOption,
    FixedSequenceParallelOption,
    FixedTpOption,
    FixedZeroOption,
    FrameworkOption,
    GpusPerNodeOption,
    JsonOption,
    ModelArgument,
    NodesOption,
    ObjectiveName,
    OptimizerChoice,
    OptimizerOption,
    PrecisionName,
    PrecisionOption,
    ProfileOption,
    SeqLenOption,
)
from paraplan.cli.step_trace import TraceOption

app = typer.Typer(add_completion=False)
MONEY_PANEL = "Time and money"
MOST_MONEY = 1e18
"""Tokens, and a price: far beyond any, and finite."""


@app.command()
def recommend(
    model: ModelArgument,
    global_batch: Annotated[
        int | None,
        typer.Option(
            "--global-batch",
            min=1,
            max=MOST_SEQUENCES,
            help="Sequences of one step over all GPUs; has to be given.",
            rich_help_panel=TRAINING_PANEL,
        ),
    ] = None,
    profile: ProfileOption = None,
    nodes: NodesOption = 1,
    gpus_per_node: GpusPerNodeOption = None,
    seq_len: SeqLenOption = None,
    precision: PrecisionOption = PrecisionName.bf16,
    optimizer: OptimizerOption = OptimizerChoice.adamw,
    attention: AttentionOption = AttentionName.sdpa,
    compiled: CompileOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="PLAN", help="Write the recommended plan to this file.")
    ] = None,
    objective: Annotated[
        ObjectiveName,
        typer.Option(
            "--objective",
            help="What makes a plan better; cost tries fewer GPUs too, simplicity takes the fewest axes within 2 % of "
            "the fastest.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = ObjectiveName.throughput,
    find: Annotated[
        FindName | None,
        typer.Option(
            "--find",
            help="Plan for the fewest GPUs that fit, the largest batch in one micro-batch, or the longest sequence.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = None,
    framework: FrameworkOption = OWN_RUNTIME,
    dp: FixedDpOption = None,
    tp: FixedTpOption = None,
    pp: FixedPpOption = None,
    cp: FixedCpOption = None,
    ep: FixedEpOption = None,
    zero: FixedZeroOption = None,
    micro_batch: FixedMicroBatchOption = None,
    recompute: FixedRecomputeOption = None,
    schedule: FixedScheduleOption = None,
    sequence_parallel: FixedSequenceParallelOption = None,
    offload: FixedOffloadOption = None,
    top: Annotated[int, typer.Option("--top", min=1, help="Rows of the table of plans.")] = 10,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show the best plan and the second, part by part.", rich_help_panel=SEARCH_PANEL
        ),
    ] = False,
    pareto: Annotated[
        bool,
        typer.Option(
            "--pareto", help="Show the plans that none beats in both time and memory.", rich_help_panel=SEARCH_PANEL
        ),
    ] = False,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            metavar="PLAN",
            help="Say what changes from an earlier plan, and why.",
            rich_help_panel=SEARCH_PANEL,
        ),
    ] = None,
    tokens: Annotated[
        float | None,
        typer.Option(
            "--tokens",
            min=1,
            max=MOST_MONEY,
            help="Tokens to train on: time and GPU-hours (1e12).",
            rich_help_panel=MONEY_PANEL,
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(
            "--price",
            min=0,
            max=MOST_MONEY,
            help="Price of a GPU-hour, in any currency; of 1e9 tokens without --tokens.",
            rich_help_panel=MONEY_PANEL,
        ),
    ] = None,
    html: HtmlOption = None,
    trace: TraceOption = None,
    check: CheckOption = None,
    tolerance: ToleranceOption = None,
    github: GithubOption = False,
    junit: JunitOption = None,
    calibration: CalibrationOption = None,
    as_json: JsonOption = False,
) -> None:
    """Choose how to train MODEL on these GPUs: memory by parts, the decision tree, and ranked plans.

    Example: paraplan recommend llama-3-8b --profile dgx-h100 --seq-len 4096 --global-batch 64 -o plan.json
    """
    require_files(html, output, trace)
    require_checks(check is not None, github=github, junit=junit, needs="--check PLAN", tolerance=tolerance)
    started = time.perf_counter()
    spec = load_model(model, seq_length=seq_len, finds_length=find is FindName.longest_sequence)
    cluster = load_cluster(profile, num_nodes=nodes, gpus_per_node=gpus_per_node)
    chosen: dict[str, Any] = {"precision": precision, "optimizer": optimizer, "attention": attention}
    batch = require_batch(global_batch, cluster)
    training = training_of(spec, seq_length=seq_len, global_batch_size=batch, compiled=compiled, **chosen)
    earlier = None if like is None else load_plan(like)
    workload = calibrated(Workload.of(spec, training, cluster, framework=framework), calibration)
    fixed = Constraints(
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero_stage=zero,
        micro_batch_size=micro_batch,
        recompute=recompute.value if recompute else None,
        schedule=schedule.value if schedule else None,
        sequence_parallel=sequence_parallel,
        offload=offload.value if offload else None,
    )
    if check is not None:
        others: dict[str, object] = {"-o": output, "--find": find, "--like": like, "--html": html, "--trace": trace}
        others |= dict.fromkeys(fixed.words, True)
        refuse_beside_check(others | {"--framework": None if workload.framework.is_own_runtime else framework})
        check_plan_file(workload, check, tolerance=tolerance, github=github, junit=junit, as_json=as_json)
        return
    question = SearchRequest(
        objective=objective.value,
        find=find.value if find else None,
        framework=None if workload.framework.is_own_runtime else workload.framework.name,
        fixed=fixed,
        num_candidates=top if html is None else max(top, MANY_KINDS),
        explains=explain,
        with_front=pareto or html is not None,
        earlier=earlier,
        tokens=1e9 if tokens is None and price is not None else tokens,
        price_per_gpu_hour=price,
    )
    whole = recommended(workload, question, html)
    seconds = time.perf_counter() - started
    write_files(whole, plan_path=output, trace=trace, html=html)
    answer = whole.cut(num_candidates=top, with_front=pareto)
    if as_json:
        typer.echo(json.dumps(answer.to_dict(plan_path=output, seconds=seconds), indent=2))
        return
    from paraplan.cli.recommend_tables import print_answer  # rich, which --json does without

    print_answer(answer, plan_path=output, seconds=seconds)
