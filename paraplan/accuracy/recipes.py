"""What published recipes switch on and tables of their runs do not say: dispatcher, overlap, CUDA graphs, recompute."""

from __future__ import annotations

from paraplan.accuracy.measured_runs import Dispatcher, Graphs, MeasuredRun
from paraplan.cost.framework import FrameworkProfile
from paraplan.hardware.profile_json import read_object, validated
from paraplan.model.model_names import plain_name
from paraplan.plan.parallel import Recompute
from paraplan.records import Record
from paraplan.resources import profiles_folder


class DispatcherValues(Record):
    """What a dispatcher sets of `ExpertsProfile`."""

    sends_tokens_once: bool
    row_moves: float
    padding_row_moves: float
    link_efficiency: dict[str, float]
    host_s_per_layer: float


class GraphValues(Record):
    """What CUDA graphs leave to the host."""

    host_s_per_block: float
    host_s_per_expert_layer: float | None = None
    """None: as the dispatcher has."""
    exchange_wait_s: float | None = None
    """None: as the framework has."""
    fuses_experts: bool = False
    """Products of experts, their activation and its quantization are one operation."""


class Recipe(Record):
    """One recipe. It holds for runs that meet all of its conditions; an empty condition is met by all."""

    models: tuple[str, ...]
    """Names as `plain_name` makes them."""
    gpus: tuple[str, ...] = ()
    """How names of GPUs begin."""
    precisions: tuple[str, ...] = ()
    ep: int | None = None
    since: str = ""
    """The first release that has it."""
    until: str = ""
    """The last."""
    dispatcher: Dispatcher
    overlaps: bool = False
    """Exchanges run beside compute of another micro-batch (overlap_moe_expert_parallel_comm)."""
    graphs: Graphs
    """Nothing, parts of layers or the whole iteration is a CUDA graph."""
    recompute: Recompute
    fp8_attention: bool = False
    """Attention multiplies in 8 bits (fp8_dot_product_attention)."""
    mtp_layers: int = 0
    """Layers for multi-token prediction, unless the name of the model says that it has none."""

    def suits(self, run: MeasuredRun) -> bool:
        """Return whether a run meets the conditions. A run that names no release is of the newest."""
        precision = run.nonstandard_features.split(" ")[0].lower() or run.precision
        release = run.release or "99"
        return (
            plain_name(run.model_name) in self.models
            and (not self.gpus or run.gpu.startswith(self.gpus))
            and (not self.precisions or precision in self.precisions)
            and self.ep in (None, run.ep)
            and (not self.since or release >= self.since)
            and (not self.until or release <= self.until)
        )


class RecipeTable(Record):
    """The recipes of one framework; of several that suit a run the first holds."""

    framework: str
    source: str
    dispatchers: dict[Dispatcher, DispatcherValues]
    dispatchers_source: str
    fp8_attention_speedup: float
    fp8_attention_source: str
    graphs: dict[Graphs, GraphValues]
    graphs_source: str
    recipes: tuple[Recipe, ...]

    def completed(self, run: MeasuredRun, framework: str) -> MeasuredRun:
        """Return a run of `framework` with blank cells as its recipe has them, unchanged where none is known."""
        suitable = (recipe for recipe in self.recipes if framework == self.framework and recipe.suits(run))
        recipe = next(suitable, None)
        if recipe is None:
            return run
        mtp_layers = 0 if "w/o mtp" in run.model_name.lower() else recipe.mtp_layers
        # Dropped rows are exchanged by all-to-all, of a capacity of 1 (training/utils/moe_token_drop.py).
        drops = "tokendrop" in run.model_name.lower()
        return run.replace(
            capacity_factor=run.capacity_factor or (1.0 if drops else None),
            fp8_attention=recipe.fp8_attention if run.fp8_attention is None else run.fp8_attention,
            mtp_layers=mtp_layers if run.mtp_layers is None else run.mtp_layers,
            dispatcher=run.dispatcher or ("alltoall" if drops else recipe.dispatcher),
            cuda_graphs=run.cuda_graphs or recipe.graphs,
            recompute=run.recompute or recipe.recompute,
            overlaps_experts=recipe.overlaps if run.overlaps_experts is None else run.overlaps_experts,
        )

    def applied(self, run: MeasuredRun, framework: FrameworkProfile) -> FrameworkProfile:
        """Return the profile with the dispatcher, overlap, CUDA graphs and 8-bit attention that a run states."""
        experts: dict[str, object] = {}
        kernels: dict[str, object] = {}
        if run.dispatcher:
            experts |= self.dispatchers[run.dispatcher].model_dump()
        if run.fp8_attention:
            kernels["attention_speedup"] = self.fp8_attention_speedup
        if run.cuda_graphs:
            values = self.graphs[run.cuda_graphs]
            kernels["host_s_per_block"] = values.host_s_per_block
            if values.host_s_per_expert_layer is not None:
                experts["host_s_per_layer"] = values.host_s_per_expert_layer
            if values.exchange_wait_s is not None:
                experts["exchange_wait_s"] = values.exchange_wait_s
            if values.fuses_experts:
                experts |= {"bias_bytes": (0.0, 0.0), "clamp_bytes": (0.0, 0.0), "product_start_s": 0.0}
        if run.capacity_factor:  # all know how many rows come
            experts["exchange_wait_s"] = 0.0
        if run.overlaps_experts is not None:
            most = 1.0 if run.cuda_graphs == "full" else framework.experts.hidden_share_of_overlap
            experts["hidden_share"] = most if run.overlaps_experts else 0.0
        return framework.changed(experts=experts, kernels=kernels)


def load_recipes() -> RecipeTable:
    """Return the bundled recipes."""
    path = profiles_folder() / "recipes.json"
    return validated(RecipeTable, read_object(path), where=str(path))
