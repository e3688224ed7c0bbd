"""Which plan to use, and whether a plan is still good."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from paraplan.api.estimates import Estimate, estimate, framed, plan_row
from paraplan.api.executors import executor_of
from paraplan.api.models import bundled_models, load_model
from paraplan.api.workloads import OWN_RUNTIME, training_of
from paraplan.api.workloads import SEQUENCES_PER_GPU as SEQUENCES_PER_GPU
from paraplan.cost.cost_model import CostModel
from paraplan.cost.lower_bounds import lower_bound_reason
from paraplan.cost.notes import workload_notes
from paraplan.cost.workload import Workload
from paraplan.errors import NoPlanFitsError, ParaplanError, PlanError, WrongArgumentError, near_names
from paraplan.hardware.cluster import Cluster
from paraplan.model.spec import ModelSpec
from paraplan.plan.files import PlanFile
from paraplan.plan.parallel import ParallelPlan
from paraplan.plan.training import TrainingSpec
from paraplan.python_words import in_python_words
from paraplan.report.ranked_rows import table_rows
from paraplan.report.short_text import Line, recommendation_lines
from paraplan.search.constraints import FREE
from paraplan.search.constraints import Constraints as Constraints
from paraplan.search.failure import NothingFitsError as NothingFitsError
from paraplan.search.money import affords
from paraplan.search.plan_files import plan_file
from paraplan.search.recommendation import Find as Find
from paraplan.search.recommendation import Recommendation as SearchAnswer
from paraplan.search.recommendation import SearchRequest as SearchRequest
from paraplan.search.recommendation import recommendation
from paraplan.search.results import Candidate, Decision, Objective, Rejection, SearchResult
from paraplan.search.what_fits import some_plan_fits
from paraplan.units import gpus

if TYPE_CHECKING:  # another search, which most calls do without
    from paraplan.hardware.prices import PriceFile
    from paraplan.search.machine_comparison import MachineComparison
    from paraplan.search.verification import PlanCheck


@dataclass(frozen=True, eq=False)
class Recommendation:
    """The plan to use, why, and what else there is. `str()` is the short answer; a notebook shows the report."""

    answer: SearchAnswer
    """The search with what was asked for beside it."""
    request: SearchRequest
    """Request that this answers."""

    @property
    def workload(self) -> Workload:
        """Workload of the plan: other machines, batch or sequence than asked where one of these was to be found."""
        return self.answer.workload

    @property
    def result(self) -> SearchResult:
        """The search as a record, for JSON."""
        return self.answer.result

    @property
    def best(self) -> Estimate:
        """The recommended plan."""
        return Estimate(self.workload, self.result.best)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The best plan of each choice of axes and ZeRO stage, fastest first."""
        return self.result.candidates

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """Questions of the decision tree, each with the numbers that decided."""
        return self.result.decisions

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on the training and on assumed speeds, a sentence each."""
        return tuple(map(in_python_words, workload_notes(self.workload)))

    def is_lower_bound(self, plan: ParallelPlan) -> bool:
        """Return whether a step of a plan takes at least what is predicted, and what it takes beyond is not priced."""
        return lower_bound_reason(self.workload, plan) is not None

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """How many plans each reason ruled out."""
        return self.result.rejections

    def cut(self, *, num_candidates: int, with_front: bool) -> Recommendation:
        """Return the answer with fewer candidates, and without its front if so asked."""
        return replace(self, answer=self.answer.cut(num_candidates=num_candidates, with_front=with_front))

    def commands(self, plan_path: Path | None) -> dict[str, str]:
        """Return the commands that start the plan, by name."""
        from paraplan.report.recommendation_json import commands

        return commands(self.answer, plan_path)

    def plan_file(self) -> PlanFile:
        """Return the recommended plan with what it was made for and what is predicted."""
        return plan_file(self.answer)

    def to_rows(self) -> list[dict[str, Any]]:
        """Return the ranked plans as flat rows, fastest first, for pandas: fields of the plan, time, memory."""
        fields = ("step_time_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_bytes", "fits")
        return [
            plan_row(each.plan)
            | {name: getattr(each, name) for name in fields}
            | {"is_recommended": each.plan == self.result.best.plan}
            for each in table_rows(self.candidates, self.result)
        ]

    def save(self, path: str | Path) -> None:
        """Write the plan file of the recommended plan."""
        self.plan_file().save(path)

    def to_dict(self, *, plan_path: Path | None = None, seconds: float = 0.0) -> dict[str, Any]:
        """Return what `paraplan recommend --json` prints; `seconds` is how long the search took."""
        from paraplan.report.recommendation_json import recommendation_report

        return recommendation_report(self.answer, plan_path=plan_path, seconds=seconds)

    def to_html(self, *, plan_path: Path | None = None) -> str:
        """Return the report, one page that needs no network; its charts need vl-convert-python."""
        from paraplan.report.recommendation_page import recommendation_page
        from paraplan.search.sizes import scaling

        sizes = scaling(
            self.workload,
            price_per_gpu_hour=self.request.price_per_gpu_hour,
            executor=self.request.executor,
            fixed=self.request.fixed,
        )
        return recommendation_page(self.answer, sizes=sizes, commands=self.commands(plan_path))

    @property
    def lines(self) -> tuple[Line, ...]:
        """The short answer, line by line."""
        return recommendation_lines(self.answer)

    def __str__(self) -> str:
        return in_python_words("\n".join(map(str, self.lines)))

    def __repr__(self) -> str:
        return f"<Recommendation {repr(self.best).removeprefix('<Estimate ')}"

    def _repr_html_(self) -> str:
        return framed(self.to_html)


def recommend(
    workload: Workload,
    *,
    objective: Objective | Literal["cost"] = "throughput",
    constraints: Constraints = FREE,
    num_candidates: int = 10,
    memory_margin: float = 0.0,
    uses_all_gpus: bool = False,
) -> Recommendation:
    """Return the plan to use, with the decision tree's reasons and the ranked plans.

    Plans are those that paraplan's runtime executes, or the framework that the workload is modelled for: what its
    exported configuration can say, or all that make sense where paraplan exports none. `memory_margin` is the share of
    usable memory to keep free; 6 % of a GPU is left for the allocator's fragmentation in any case. GPUs stay idle where
    fewer train clearly faster, unless `uses_all_gpus`: the answer's workload has those that are used.

    Raises `NoPlanFitsError` where no plan fits, with what would help, and `PlanError` for constraints that exclude each
    other.
    """
    if num_candidates < 1:
        raise WrongArgumentError(f"num_candidates={num_candidates} of recommend", hint="use 1 or more")
    if not 0 <= memory_margin < 1:
        raise WrongArgumentError(f"memory_margin={memory_margin} of recommend is no share", hint="use 0 to 0.99")
    framework = None if workload.framework.is_own_runtime else workload.framework.name
    request = SearchRequest(
        objective=objective,
        framework=framework,
        fixed=constraints,
        num_candidates=num_candidates,
        memory_margin=memory_margin,
        uses_all_gpus=uses_all_gpus,
        with_front=True,
    )
    return answer(workload, request)


def sweep(workload: Workload, plan: ParallelPlan | None = None, /, **values: Iterable[Any]) -> list[dict[str, Any]]:
    """Return a flat row for each combination of values, for pandas: `sweep(job, seq_length=[2048, 4096, 8192])`.

    `values` are what `Workload.replace` takes. A row has the values, and the recommended plan with its figures, or
    those of `plan`. Where no plan fits, or a value cannot be, it has `fits` False and `why`. Raises
    `WrongArgumentError` for a name that `replace` does not know.
    """
    known = ("model", "cluster", "framework", *TrainingSpec.model_fields)
    for name in values:
        if name not in known:
            raise WrongArgumentError(f"a workload has no {name!r} to sweep", hint=near_names(name, known))
    rows = []
    for chosen in product(*values.values()):
        row = dict(zip(values, chosen, strict=True))
        try:
            changed = workload.replace(**row)
            found = recommend(changed, num_candidates=1).best if plan is None else estimate(changed, plan)
            rows.append(row | found.to_row())
        except (NoPlanFitsError, PlanError) as error:
            rows.append(row | {"fits": False, "why": in_python_words(error.message)})
    return rows


def answer(workload: Workload, request: SearchRequest) -> Recommendation:
    """Return the recommendation for a whole request: a search with all that may be asked for beside it.

    Raises as `recommend` does.
    """
    request = replace(request, executor=executor_of(workload), executors=executor_of)
    if request.find == "largest-model":
        request = replace(request, fixed=_without_offload(request.fixed))
    constants = workload.constants.replace(memory_margin=request.memory_margin)
    model = CostModel.of_workload(replace(workload, constants=constants))
    return Recommendation(recommendation(model, request), request)


def _without_offload(fixed: Constraints) -> Constraints:
    """Return what is fixed without offload, unless one is asked for: with it nearly all fits, at the host's pace."""
    return replace(fixed, offload=fixed.offload or "none")


def largest_model(
    cluster: Cluster,
    *,
    seq_length: int | None = None,
    global_batch_size: int | None = None,
    framework: str = OWN_RUNTIME,
    constraints: Constraints = FREE,
    memory_margin: float = 0.0,
    money: float | None = None,
    price_per_gpu_hour: float | None = None,
    tokens: float | None = None,
    **training: object,
) -> ModelSpec:
    """Return the bundled model with most parameters that some plan trains on these machines, without offload.

    With `money` and a price it is the largest that these train on `tokens`, by default on the compute-optimal 20 for
    each parameter. `training` are more fields of a `TrainingSpec`; by default a GPU has
    `SEQUENCES_PER_GPU`, as on the command line. Raises `NoPlanFitsError` where none fits.
    """
    sequences = global_batch_size or cluster.num_gpus * SEQUENCES_PER_GPU
    fixed = _without_offload(constraints)
    for model in sorted(map(load_model, bundled_models()), key=lambda one: one.parameters.total, reverse=True):
        try:
            asked = training_of(model, seq_length=seq_length, global_batch_size=sequences, **training)
            workload = Workload.of(model, asked, cluster, framework=framework)
            workload = replace(workload, constants=workload.constants.replace(memory_margin=memory_margin))
            executor = executor_of(workload)
            fits = some_plan_fits(workload, executor=executor, fixed=fixed)
            if fits and money is not None and price_per_gpu_hour:
                fits = affords(
                    workload,
                    money=money,
                    price_per_gpu_hour=price_per_gpu_hour,
                    tokens=tokens,
                    executor=executor,
                    fixed=fixed,
                )
        except ParaplanError:  # it has no such layers, or no sequences of that length
            continue
        if fits:
            return load_model(model.source, seq_length=seq_length)
    if money is not None:
        raise NoPlanFitsError(
            f"no bundled model trains for {money:,.0f} on {gpus(cluster.num_gpus)} of this kind without offload",
            hint="say on how many tokens with --tokens: by default it is 20 for each parameter",
        )
    raise NoPlanFitsError(
        f"no bundled model trains on {gpus(cluster.num_gpus)} of this kind without offload",
        hint="leave out --find, and name a model: plans with offload are searched too",
    )


def check(workload: Workload, plan: ParallelPlan, *, tolerance: float = 0.05) -> PlanCheck:
    """Return whether a plan suits a workload, uses its GPUs, fits, can be executed, and is fast enough.

    The workload's framework is what executes it. `tolerance` is relative: 0.05 allows a step that takes 5 % longer than
    the best plan's.
    """
    from paraplan.search.verification import check_plan

    executor = executor_of(workload)
    return check_plan(CostModel.of_workload(workload), plan, tolerance=tolerance, executor=executor)


def nothing_fits_dict(error: NoPlanFitsError) -> dict[str, Any]:
    """Return what `paraplan recommend --json` prints where no plan fits: the nearest plan, and what would fit."""
    found: dict[str, Any] = {"error": error.message, "hint": error.hint, "levers": []}
    if isinstance(error, NothingFitsError):
        nearest = error.nearest
        found["nearest"] = {
            "plan": nearest.plan.model_dump(mode="json"),
            "peak_memory_bytes": nearest.peak_memory_bytes,
            "usable_memory_bytes": nearest.usable_memory_bytes,
            "host_bytes_per_node": nearest.host_bytes_per_node,
        }
        found["levers"] = [one.model_dump() for one in error.offers]
    return found


def nothing_fits_html(workload: Workload, error: NothingFitsError) -> str:
    """Return the report of a workload that no plan fits: what was lacking and what would help."""
    from paraplan.report.recommendation_page import nothing_fits_page
    from paraplan.search.tree import decide, tree_facts

    return nothing_fits_page(workload, error, decide(tree_facts(workload)).decisions)


def compare_machines(
    workloads: Sequence[Workload],
    request: SearchRequest,
    *,
    prices: Sequence[PriceFile] | None = None,
    is_spot: bool = False,
) -> MachineComparison:
    """Return the best plan on each of several machines, the best machine first; prices are the bundled by default."""
    from paraplan.hardware.prices import load_prices
    from paraplan.search.machine_comparison import compare_machines as compare

    constants = [work.constants.replace(memory_margin=request.memory_margin) for work in workloads]
    known = [replace(work, constants=each) for work, each in zip(workloads, constants, strict=True)]
    request = replace(request, executor=executor_of(workloads[0]))
    return compare(known, request, load_prices() if prices is None else prices, is_spot=is_spot)
