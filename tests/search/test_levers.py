from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from case_selection import with_all
from hypothesis import given, settings
from hypothesis import strategies as st

from paraplan.api.executors import executor_of
from paraplan.cost.estimate import estimate_plan
from paraplan.cost.loading import can_load, loading_of
from paraplan.cost.workload import Workload
from paraplan.errors import PlanError
from paraplan.hardware.catalogue.profile_files import cluster_from_profile
from paraplan.model.reader import read_model
from paraplan.plan.executor import ANYTHING, OWN_RUNTIME
from paraplan.plan.training import TrainingSpec
from paraplan.report.short_text import recommendation_lines
from paraplan.search.constraints import FREE, Constraints
from paraplan.search.failure import NothingFitsError
from paraplan.search.lever_trials import LeverTrials, offer_of
from paraplan.search.levers import levers
from paraplan.search.offered import explained
from paraplan.search.offers import LeverOffer
from paraplan.search.own_options import ChosenOptions
from paraplan.search.recommendation import Find, Recommendation, SearchRequest, recommendation
from paraplan.search.search import search

GIB = 2**30
MakeWorkload = Callable[..., Workload]


@cache
def _answer(made: Workload) -> Recommendation:
    """Return what is recommended where nothing is fixed, which several tests look at."""
    return recommendation(made, SearchRequest())


def _by_options(offers: Iterable[LeverOffer]) -> dict[str, LeverOffer]:
    return {one.options: one for one in offers}


def _with_host(made: Workload, gib: int) -> Workload:
    """Return a workload on machines whose memory holds no more than so much of what is offloaded."""
    return made.replace(cluster=made.cluster.replace(host_memory_bytes=gib * GIB))


def _of_framework(made: Workload, framework: str) -> Workload:
    return Workload.of(made.whole_model or made.model, made.training, made.cluster, made.links, framework=framework)


def test_a_lever_that_fits_is_the_search_of_that_training(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="rtx-4090-x2", seq_length=2048, global_batch_size=16)
    without = Constraints(offload="none")
    offers = _by_options(LeverTrials(made, OWN_RUNTIME, without).offers(looks_for_fewest=True))
    assert offers["--train lora:r=16 --base-weights nf4:double"].fewest_gpus == 1
    for offer in offers.values():
        assert offer.lacking is not None or offer.fits == (offer.peak_memory_bytes <= offer.usable_memory_bytes)
    best = search(made.trained_as(made.training.replace(train="lora:r=16")), num_candidates=1, fixed=without).best
    assert offers["--train lora:r=16"].plan == best.plan.describe()
    assert offers["--train lora:r=16"].step_time_s == best.step.step_time_s


def test_levers_that_need_the_host_stand_after_those_that_fit_on_the_gpus(workload: MakeWorkload) -> None:
    fields = {"global_batch_size": 8, "seq_length": 6144, "train": "lora:r=16"}
    made = _of_framework(workload("llama-3-8b", profile="rtx-3060-x2", gpus=1, **fields), "llama-factory")
    with pytest.raises(NothingFitsError) as caught:
        search(made, num_candidates=1, executor=executor_of(made))
    error = explained(caught.value, made, executor=executor_of(made), fixed=FREE, executors=executor_of)
    fitting = [one for one in error.offers if one.fits]
    assert [one.options for one in fitting[:2]] == ["--loss liger --base-weights nf4:double", "--loss liger"]
    assert [one.offloads_parameters for one in fitting[:2]] == [False, True]
    assert not any(one.options.startswith("without --offload") for one in error.offers)


def test_a_tool_that_wants_its_layers_named_is_offered_with_their_names(workload: MakeWorkload) -> None:
    stored = {"train": "lora:r=16", "base_weights": "nf4:double"}
    alone = workload("qwen3-30b-a3b", profile="rtx-4090-x2", gpus=1, global_batch_size=8, seq_length=4096, **stored)
    made = _of_framework(alone, "axolotl")
    with pytest.raises(NothingFitsError) as caught:
        search(made, num_candidates=1, executor=executor_of(made))
    error = explained(caught.value, made, executor=executor_of(made), fixed=FREE, executors=executor_of)
    first = next(one for one in error.offers if one.fits)
    assert first.options == "--loss liger --quantizer axolotl --train 'qlora:r=16,targets=q|k|v|o'"
    assert "--offload-activations (needs" in (error.hint or "")  # under full recompute axolotl has it


def test_options_for_long_sequences_are_chosen_where_nothing_fits_without(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=2**20, global_batch_size=1)
    answer = recommendation(made, SearchRequest())
    best, chosen = answer.result.best, answer.chosen
    assert chosen is not None
    assert chosen.options == "--loss chunked --stack mlp_tile=4096"
    assert (answer.workload.training.loss, answer.workload.training.stack.mlp_tile) == ("chunked", 4096)
    without = estimate_plan(made, best.plan)
    assert best.fits
    assert not without.fits
    assert best.plan.offload == "none"
    assert chosen.saved_bytes == without.peak_memory_bytes - best.peak_memory_bytes
    assert without.step.step_time_s == pytest.approx((1 - chosen.share_of_step) * best.step.step_time_s)
    assert ChosenOptions.of(made, ANYTHING, FREE) is None  # other software has options of its own
    first = next(one for one in LeverTrials(made, OWN_RUNTIME, FREE).offers() if one.fits)
    assert first.options == "--loss liger"
    assert first.keeps_training
    assert first.peak_memory_bytes == pytest.approx(66.8 * GIB, rel=0.06)


@pytest.mark.with_all  # the order of levers is looked at, above
def test_levers_stand_beside_a_plan_with_offload_and_none_beside_one_with_room(workload: MakeWorkload) -> None:
    offloaded = _answer(workload("llama-3-8b", profile="rtx-4090-x2", seq_length=2048, global_batch_size=16))
    assert offloaded.result.best.plan.offload != "none"
    assert any(one.fits and one.slowdown is not None and one.slowdown < 0 for one in offloaded.levers)
    fitting = recommendation(workload("gpt2", profile="dgx-h100", seq_length=1024), SearchRequest())
    assert fitting.levers == ()


def test_levers_come_in_one_order_and_machines_last(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="1xh100", seq_length=8192, global_batch_size=8)
    with pytest.raises(NothingFitsError) as caught:
        recommendation(_with_host(made, 100), SearchRequest())
    fitting = [one.options for one in caught.value.offers if one.fits]
    order = [
        "--train lora:r=16",
        "--base-weights nf4:double",
        "--optimizer adamw_8bit",
        "--profile 2xh100",
        "--profile",
    ]
    places = [next(place for place, one in enumerate(fitting) if words in one) for words in order]
    assert places == sorted(places)
    hint = caught.value.hint or ""
    assert all(one.in_words in hint for one in caught.value.offers)


@pytest.mark.parametrize(
    ("model", "profile", "options", "most_gib"),
    [
        ("gpt-oss-20b", "1xrtx-4090", "--base-weights nf4:double --quantizer axolotl", 21.8),
        # The one above is offered what this one is, and what is its own.
        *with_all([("llama-3-8b", "1xrtx-3060", "--base-weights nf4:double", 10.4)]),
    ],
)
def test_adapters_that_do_not_fit_are_offered_weights_in_4_bits(
    workload: MakeWorkload, model: str, profile: str, options: str, most_gib: float
) -> None:
    made = workload(model, profile=profile, seq_length=2048, global_batch_size=8, train="lora:r=16")
    with pytest.raises(NothingFitsError) as caught:
        recommendation(_with_host(made, 4), SearchRequest())
    fitting = [one for one in caught.value.offers if one.fits]
    assert fitting[0].options == options
    assert (fitting[0].peak_memory_bytes or 0) < most_gib * GIB
    if made.model.released_in is not None:  # tools train nothing over that
        own = f"--base-weights {made.model.released_in}"
        assert [one.note is not None for one in fitting if one.options == own] == [True]


def test_a_format_over_which_the_tool_trains_nothing_is_told_as_such(workload: MakeWorkload) -> None:
    made = workload("gpt-oss-120b", profile="1xrtx-pro-6000", seq_length=1024, global_batch_size=8, train="lora:r=16")
    own = _by_options(LeverTrials(made, OWN_RUNTIME, FREE).offers())["--base-weights mxfp4"]  # it is released so
    assert own.fits
    assert "trains no adapters over mxfp4" in own.in_words


def test_4_bit_weights_that_lack_little_are_offered_with_scales_in_bytes(workload: MakeWorkload) -> None:
    fields = {"seq_length": 1024, "global_batch_size": 8, "train": "lora:r=16", "base_weights": "nf4"}
    made = workload("llama-3.3-70b", profile="1xrtx-a6000", **fields)
    offers = LeverTrials(made, OWN_RUNTIME, Constraints(offload="none")).offers()
    assert any(one.fits and "--base-weights nf4:double" in one.options for one in offers)


def test_levers_that_are_not_enough_alone_are_tried_together(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="1xrtx-4090", seq_length=16384, global_batch_size=2)
    with pytest.raises(NothingFitsError) as caught:
        recommendation(made, SearchRequest())
    alone = [
        one for one in caught.value.offers if one.options.count("--") == 1 and not one.options.startswith("--prof")
    ]
    assert not any(one.fits for one in alone if "seq-len" not in one.options)
    together = [one.options for one in caught.value.offers if one.fits]
    adapters = "--loss liger --train lora:r=16"  # whose base is on the host, which comes after all on the GPU
    assert together[:2] == [f"{adapters} --base-weights nf4:double", adapters]


@pytest.mark.parametrize(
    ("find", "lever", "word"),
    [("largest-batch", "--loss liger", "sequences"), *with_all([("longest-sequence", "--loss liger", "tokens")])],
)
def test_what_a_free_lever_finds_stands_before_everything(
    workload: MakeWorkload, find: Find, lever: str, word: str
) -> None:
    made = workload("llama-3-8b", profile="1xa100", global_batch_size=1, train="lora:r=16", base_weights="nf4:double")
    answer = recommendation(made, SearchRequest(find=find))
    offer = _by_options(answer.levers)[lever]
    assert offer.is_free
    found, _, unit = (offer.found or "").partition(" ")
    before = answer.workload.training
    assert unit == word
    assert int(found) > 1.5 * (before.seq_length if word == "tokens" else before.global_batch_size)
    lines = recommendation_lines(answer)
    labels = [line.label for line in lines]
    assert labels.index("First") < labels.index("Plan")
    assert lines[labels.index("First")].text == offer.in_short
    assert not any(line.label == "Faster" and line.text.startswith(f"{lever}:") for line in lines)


@pytest.mark.with_all  # what saves GPUs is joined with other GPUs, below
def test_fewer_gpus_are_found_with_a_lever(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="8xh100", seq_length=8192, global_batch_size=64)
    answer = recommendation(made, SearchRequest(find="fewest-gpus"))
    assert answer.workload.cluster.num_gpus == 2
    assert _by_options(answer.levers)["--train lora:r=16"].found == "1 GPU"


@pytest.mark.parametrize(
    ("framework", "options"),
    [
        ("megatron-core", {"--loss liger", "--optimizer adamw_8bit", "--offload-activations"}),
        *with_all([("torchtitan", {"--optimizer adamw_8bit"})]),  # a part of what the first one lacks
    ],
)
def test_levers_that_a_framework_lacks_are_said_in_a_line(
    workload: MakeWorkload, framework: str, options: set[str]
) -> None:
    made = _of_framework(
        workload("llama-3.2-1b", profile="1xh100", seq_length=2_000_000, global_batch_size=1), framework
    )
    with pytest.raises(NothingFitsError) as caught:
        recommendation(made, SearchRequest(executor=executor_of(made)))
    lacking = _by_options(one for one in caught.value.offers if one.lacking is not None)
    assert options <= lacking.keys()
    line = (caught.value.hint or "").splitlines()[-1].strip()
    assert line.startswith(f"not in {made.framework.title}: ")
    assert all(words in line for words in lacking)


def test_a_lever_that_is_not_enough_is_kept_while_shorter_sequences_are_sought(workload: MakeWorkload) -> None:
    made = workload("llama-3.2-1b", profile="1xrtx-4090", seq_length=131072, global_batch_size=8, train="lora:r=16")
    with pytest.raises(NothingFitsError) as caught:
        search(made)
    offers = explained(caught.value, made, executor=OWN_RUNTIME, fixed=FREE, executors=lambda _: ANYTHING).offers
    shorter = next(one for one in offers if "--seq-len" in one.options)
    assert shorter.options.startswith("--loss liger --seq-len ")
    assert int(shorter.options.split()[-1]) > 60_000  # 15,104 without the fused loss
    assert "--framework unsloth" in [one.options for one in offers]  # what blocks keep is on the host


@pytest.mark.parametrize(
    ("model", "profile", "seq_length", "fields"),
    [
        ("llama-3-8b", "1xrtx-4090", 8192, {}),
        ("qwen2.5-14b", "1xrtx-4090", 16384, {"train": "lora:r=16"}),
        *with_all(
            [
                ("llama-3-8b", "1xrtx-3060", 6144, {"train": "lora:r=16"}),
                ("qwen3-30b-a3b", "1xrtx-3090", 8192, {"train": "lora:r=16"}),
            ]
        ),
    ],
)
def test_levers_offered_together_are_the_least_that_fits(
    workload: MakeWorkload, model: str, profile: str, seq_length: int, fields: dict[str, str]
) -> None:
    made = _with_host(workload(model, profile=profile, seq_length=seq_length, global_batch_size=2, **fields), 4)
    trials = LeverTrials(made, OWN_RUNTIME, FREE)
    offers = [one for one in trials.offers() if one.fits]
    assert len(offers) <= 3
    alone = {one.options: one for one in levers(made, FREE, OWN_RUNTIME)}
    for offer in offers:
        parts = [one for options, one in alone.items() if options != offer.options and options in offer.options]
        for part in parts:
            tried = offer_of(part, made, executor=OWN_RUNTIME, fixed=FREE)
            assert tried is None or not tried[0].fits, (offer.options, part.options)


@settings(max_examples=2 + len(with_all("more")), deadline=None)
@given(
    model=st.sampled_from(["qwen3-30b-a3b", "gpt-oss-120b", "llama-3-70b", "mixtral-8x7b"]),
    profile=st.sampled_from(["4xa100", "4xrtx-4090", "2xrtx-5090"]),
    seq_length=st.sampled_from([2048, 8192]),
)
def test_a_heavier_storage_is_never_said_to_need_fewer_gpus(model: str, profile: str, seq_length: int) -> None:
    training = TrainingSpec(global_batch_size=16, seq_length=seq_length)
    made = Workload.of(read_model(model), training, cluster_from_profile(profile))
    offers = LeverTrials(made, OWN_RUNTIME, FREE).offers(looks_for_fewest=True)
    sizes = [
        (sum((part.frozen_bytes or 0.0) * n for part, n in lever.workload(made).model.all_parameters), one.fewest_gpus)
        for one in offers
        for lever in levers(made, FREE, OWN_RUNTIME)
        if lever.options == one.options and lever.trains_adapter and one.fits
    ]
    counts = [fewest or made.cluster.num_gpus for _, fewest in sorted(sizes, key=lambda size: -size[0])]
    assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize(
    ("model", "profile", "nodes", "length", "batch"),
    [("llama-3-8b", "rtx-4090-x2", 1, 2048, 16), *with_all([("llama-3-70b", "dgx-h100", 2, 4096, 64)])],
)
def test_no_lever_is_offered_that_is_slower_than_the_plan_or_takes_more_than_its_own_may(
    workload: MakeWorkload, model: str, profile: str, nodes: int, length: int, batch: int
) -> None:
    answer = _answer(workload(model, profile=profile, num_nodes=nodes, seq_length=length, global_batch_size=batch))
    offers = [one for one in answer.levers if one.fits]
    assert 0 < len(offers) <= 3
    assert all((one.slowdown or 0.0) <= 0.1 for one in offers)
    assert all((one.peak_memory_bytes or 0) <= (one.usable_memory_bytes or 0) for one in offers)


@pytest.mark.parametrize("shards", [False, True])
def test_a_plan_that_loads_is_chosen_before_one_that_does_not(workload: MakeWorkload, *, shards: bool) -> None:
    made = workload("llama-3-8b", profile="8xh100", seq_length=1024, global_batch_size=64)
    ways = {"replicated": "each_rank_host", "sharded": "shards"} if shards else {"sharded": "each_rank_host"}
    loading = made.framework.loading.replace(option=None, without=None, **ways)
    cluster = made.cluster.replace(host_memory_bytes=200 * GIB)
    changed = replace(made, framework=made.framework.replace(loading=loading), cluster=cluster)
    best = search(changed, num_candidates=3).best.plan
    assert (best.zero_stage > 0) == shards  # the runtime's sharded stages are FSDP's
    assert can_load(changed, lambda name: np.array([getattr(best, name)])).all()


@pytest.mark.parametrize(
    ("model", "profile", "first"),
    [
        ("llama-2-70b", "2xrtx-3090", "--framework fsdp --quantizer transformers-4"),
        *with_all([("qwen3-30b-a3b", "2xrtx-5090", "--quantizer axolotl")]),
    ],
)
def test_what_no_way_loads_is_refused_with_what_loads_it(
    workload: MakeWorkload, model: str, profile: str, first: str
) -> None:
    fields = {"train": "lora:r=16", "base_weights": "nf4"}
    made = workload(model, profile=profile, seq_length=1024, global_batch_size=8, **fields)
    with pytest.raises(NothingFitsError, match=r"no plan can be loaded: .* each rank has all weights") as caught:
        recommendation(made, SearchRequest(executors=executor_of))
    fitting = [one for one in caught.value.offers if one.fits]
    assert fitting[0].options == first
    assert not any(one.unloadable for one in fitting)


@pytest.mark.parametrize(("framework", "quantizer"), [("paraplan", None), ("fsdp", "transformers-4")])
def test_what_is_recommended_can_be_loaded_or_is_told_first_how(
    workload: MakeWorkload, framework: str, quantizer: str | None
) -> None:
    fields = {"train": "lora:r=16", "base_weights": "nf4", "quantizer": quantizer}
    made = _of_framework(
        workload("qwen2.5-32b", profile="4xrtx-5090", seq_length=1024, global_batch_size=8, **fields), framework
    )
    for host_memory_bytes in (512 * GIB, 16 * GIB):
        cluster = made.cluster.replace(host_memory_bytes=host_memory_bytes)
        try:
            answer = recommendation(replace(made, cluster=cluster), SearchRequest(executor=executor_of(made)))
        except NothingFitsError:
            continue
        loading = loading_of(answer.workload, answer.result.best)
        if loading is not None and not loading.fits:
            lines = recommendation_lines(answer)
            assert loading.keeps_plan
            assert [line.label for line in lines].index("First") < [line.label for line in lines].index("Plan")


@pytest.mark.parametrize(
    ("model", "profile", "framework", "options"),
    [
        ("gpt-oss-20b", "1xt4", "paraplan", "--quantizer axolotl --profile 1xrtx-4090"),
        (
            "mixtral-8x7b",
            "2xrtx-4090",
            "axolotl",
            "--quantizer axolotl --train 'qlora:r=8,targets=q|k|v|o' --profile 2xrtx-5090",
        ),
    ],
)
def test_what_saves_gpus_is_joined_with_other_gpus(
    workload: MakeWorkload, model: str, profile: str, framework: str, options: str
) -> None:
    weights = "nf4:double" if framework == "axolotl" else "nf4"
    fields = {"train": "lora:r=8", "base_weights": weights, "precision": "fp16"}
    made = _of_framework(workload(model, profile=profile, seq_length=1024, global_batch_size=4, **fields), framework)
    with pytest.raises(NothingFitsError) as caught:
        recommendation(made, SearchRequest(executor=executor_of(made), executors=executor_of))
    assert options in _by_options(one for one in caught.value.offers if one.fits)


def test_an_option_that_a_framework_lacks_is_refused(workload: MakeWorkload) -> None:
    made = _of_framework(workload("llama-3-8b", profile="8xh100", loss="liger"), "megatron-core")
    with pytest.raises(PlanError, match="loss='liger': it has no loss in chunks"):
        executor_of(made)


def test_one_fixed_choice_that_is_the_reason_is_offered_left_free(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=8192, global_batch_size=64)
    fixed = Constraints(tp=1, pp=1, cp=1, zero_stage=2, recompute="none")
    with pytest.raises(NothingFitsError) as caught:
        recommendation(made, SearchRequest(fixed=fixed))
    offers = _by_options(caught.value.offers)
    free = search(made, num_candidates=1, fixed=replace(fixed, recompute=None)).best
    assert offers["without --recompute none"].plan == free.plan.describe()
    assert offers["without --recompute none"].fits
    assert "without --pp 1" not in offers or not offers["without --pp 1"].fits  # beside a pipeline is no ZeRO-2


def test_lora_is_searched_over_replicas_shards_and_pipelines(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="rtx-4090-x2", seq_length=2048, global_batch_size=16)
    result = search(made.trained_as(made.training.replace(train="lora:r=16")))
    found = {(one.plan.pp > 1, one.plan.zero_stage) for one in result.candidates if one.fits}
    assert {(True, 0), (False, 3)} <= found
    # One count of FLOPs, without products for frozen weights, is behind all figures.
    best = result.best.step
    for one in result.candidates:
        assert one.mfu / one.tokens_per_s_per_gpu == pytest.approx(best.mfu / best.tokens_per_s_per_gpu)


def test_no_quantized_plan_splits_tensors(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", seq_length=2048, global_batch_size=16)
    quantized = made.trained_as(made.training.replace(train="lora:r=16", base_weights="nf4"))
    result = search(quantized)
    assert all(one.plan.tp == 1 for one in result.candidates)
    assert any("cannot divide nf4" in rejection.reason for rejection in result.rejections)
    assert estimate_plan(quantized, result.best.plan).fits


def test_products_in_8_bits_leave_4_bit_weights_out(workload: MakeWorkload) -> None:
    made = workload("llama-3-8b", profile="dgx-h100", linear_precision="fp8")
    names = [one.name for one in levers(made, FREE, OWN_RUNTIME)]
    assert "LoRA" in names
    assert "QLoRA" not in names
