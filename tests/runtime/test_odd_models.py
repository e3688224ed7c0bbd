"""Models that no pipeline was written for train as in one process, or are refused by name on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from case_selection import with_all
from odd_models import (
    BATCH,
    REFUSED,
    SOUND,
    SPLIT,
    Base,
    BlockTiedToHead,
    BranchBetween,
    Branches,
    ByData,
    ByteCache,
    Chosen,
    DetachedPrior,
    DetachedSkip,
    DrawsByPython,
    DropsLayers,
    Fields,
    FrozenAverage,
    FrozenTower,
    InPlaceBlocks,
    InputSkip,
    IntegerPath,
    LateBuffer,
    MeanOfWords,
    NoiseAtBothEnds,
    Normed,
    NormedEnds,
    PooledStates,
    Reassigned,
    Run,
    SharedCount,
    SharedPart,
    SharedWeight,
    StepCount,
    TowerByMethod,
    TrainedTower,
    Unused,
    ValuesOfHeads,
    WarmUp,
    difference,
    train_all,
)
from rank_harness import RankHarness

from paraplan.plan.parallel import ParallelPlan

pytestmark = pytest.mark.ranks

ALONE = ParallelPlan(num_microbatches=2, micro_batch_size=BATCH // 2)
PIPELINES = [
    ParallelPlan(
        pp=2,
        pipeline_schedule=schedule,
        virtual_pipeline_size=virtual,
        num_microbatches=2,
        micro_batch_size=BATCH // 2,
    )
    for schedule, virtual in (("1f1b", 1), ("zero_bubble", 1), ("interleaved_1f1b", 2))
]


Alone = Callable[..., list[Run]]
WHOLE_BATCH = ParallelPlan(micro_batch_size=BATCH)


@pytest.fixture(scope="module")
def alone(ranks: RankHarness) -> Alone:
    """Return the trainings of models in one process, run once for each."""
    known: dict[tuple[type[Base], ParallelPlan], Run] = {}

    def trained(kinds: Sequence[type[Base]], plan: ParallelPlan = ALONE) -> list[Run]:
        new = [kind for kind in kinds if (kind, plan) not in known]
        if new:
            runs = ranks.run_alone(train_all, new, [plan])[0]
            known.update({(kind, plan): run for kind, run in zip(new, runs, strict=True)})
        return [known[kind, plan] for kind in kinds]

    return trained


def test_models_of_odd_build_train_as_in_one_process(ranks: RankHarness, alone: Alone) -> None:
    """Every one on two stages: a third of them each under 1F1B, in halves of backward passes, on four stages."""
    references = alone(SOUND)
    refused_where_stages_meet = (WarmUp, FrozenAverage)  # written where two stages read it
    wrong = {}
    for number, plan in enumerate(PIPELINES):
        chosen = [
            kind
            for index, kind in enumerate(SOUND)
            if index % 3 == number or (number != 1 and kind in refused_where_stages_meet)
        ]
        chosen += with_all([kind for kind in SOUND if kind not in chosen])
        by_rank = ranks.run(train_all, chosen, [plan], size=2, timeout_s=240.0)
        for place, kind in enumerate(chosen):
            index = SOUND.index(kind)
            runs = [found[0][place] for found in by_rank]
            key = (kind.__name__, plan.pipeline_schedule)
            refused = [run for run in runs if isinstance(run, str)]
            if refused:
                wrong[key] = refused
                continue
            errors = [difference(run, references[index]) for run in runs]
            if any(errors):
                wrong[key] = errors
            for what in ("gradients", "parameters", "buffers"):
                held = {name for run in runs for name in getattr(run, what)}
                if held != set(getattr(references[index], what)):
                    wrong[*key, what] = held ^ set(getattr(references[index], what))
    allowed = {(kind.__name__, "interleaved_1f1b") for kind in refused_where_stages_meet}
    assert wrong.keys() == allowed, {key: value for key, value in wrong.items() if key not in allowed}
    for refusals in wrong.values():
        assert all("several stages of one rank" in refusal for refusal in refusals)


def test_models_of_which_stages_would_compute_something_else_are_refused_on_every_rank(ranks: RankHarness) -> None:
    for found in ranks.run(train_all, list(REFUSED), PIPELINES[:1], size=2, timeout_s=120.0):
        for (kind, words), said in zip(REFUSED.items(), found[0], strict=True):
            assert isinstance(said, str), kind
            assert words in said, (kind, said)


def test_blocks_that_write_what_a_second_run_would_read_are_refused_and_their_own_buffers_written_once(
    ranks: RankHarness, alone: Alone
) -> None:
    full = PIPELINES[1].replace(recompute="full")
    references = alone([Normed])
    for found in ranks.run(train_all, [InPlaceBlocks, Normed, FrozenTower], [full], size=2):
        in_place, normed, sound = found[0]
        assert "write in place into the hidden state" in in_place
        assert not difference(normed, references[0])
        assert not isinstance(sound, str)


def test_code_between_the_blocks_is_refused_where_ranks_have_some_tokens(ranks: RankHarness, alone: Alone) -> None:
    plan = ALONE.replace(tp=2, sequence_parallel=True)
    (expected,) = alone([Normed])
    for found in ranks.run(train_all, [PooledStates, Normed], [plan], size=2):
        pooled, normed = found[0]
        assert "code between the blocks reads hidden states" in pooled
        assert not isinstance(normed, str)
        assert not difference(normed, expected)  # its statistics in training are of all tokens


def test_models_of_odd_build_are_sharded_as_in_one_process(ranks: RankHarness, alone: Alone) -> None:
    """Buffers follow the data of each rank under data parallelism."""
    kinds = [SharedPart, SharedWeight, BlockTiedToHead, FrozenTower, TrainedTower, Chosen, ValuesOfHeads]
    references = alone(kinds)
    # Parameters are whole in the passes of the first two stages: most models have one of these.
    for stage, chosen in ((1, kinds[1::3]), (2, []), (3, kinds[::2])):
        plan = ALONE.replace(dp=2, micro_batch_size=BATCH // 4, zero_stage=stage)
        tried = with_all(kinds) or chosen
        if not tried:
            continue
        for found in ranks.run(train_all, tried, [plan], size=2, timeout_s=240.0):
            for kind, run in zip(tried, found[0], strict=True):
                assert not isinstance(run, str), (kind, run)
                assert not difference(run, references[kinds.index(kind)]), (kind, stage)


# What sets these apart lies outside of what tp splits, or another model has it too: WarmUp a
# buffer that is written, Normed statistics. Pipelines, which cut there, have them all.
AS_OTHERS_UNDER_TP = {FrozenTower, TowerByMethod, DetachedPrior, ByData, Unused, StepCount, MeanOfWords, NormedEnds}
AS_OTHERS_UNDER_TP |= {
    TrainedTower,
    FrozenAverage,
    IntegerPath,
    InputSkip,
    SharedCount,
    DetachedSkip,
    Branches,
    BranchBetween,
    Fields,
    ByteCache,
    PooledStates,
    LateBuffer,
    Reassigned,
}
RANDOM = {NoiseAtBothEnds, DropsLayers, DrawsByPython}
# Nothing that can be split.
NOT_SPLIT = {
    "Images": "can be split",
    "ValueResidual": "can be split",
    "SharedWeight": "belong to another layer",
}


def test_models_of_odd_build_train_with_split_layers_as_in_one_process(ranks: RankHarness, alone: Alone) -> None:
    kinds = [*SPLIT, *SOUND, *(kind for kind in REFUSED if kind not in RANDOM)]
    kinds = [kind for kind in kinds if kind not in AS_OTHERS_UNDER_TP or with_all([kind])]
    references = alone(kinds, WHOLE_BATCH)
    refused = {}
    for found in ranks.run(train_all, kinds, [WHOLE_BATCH.replace(tp=2)], size=2, timeout_s=240.0):
        for kind, run, reference in zip(kinds, found[0], references, strict=True):
            if isinstance(run, str):
                refused[kind.__name__] = run
            else:
                assert not difference(run, reference), kind
    assert refused.keys() == NOT_SPLIT.keys()
    assert all(words in refused[kind] for kind, words in NOT_SPLIT.items())
