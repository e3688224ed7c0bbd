"""Options of published recipes that tables of their runs do not say: dispatcher, overlap, CUDA graphs, recompute."""

from __future__ import annotations

from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.hardware.profile_json import read_object, validated
from paraplan.model.model_names import plain_name
from paraplan.plan.parallel import Recompute
from paraplan.plan.stack import Dispatcher, Graphs
from paraplan.records import Record
from paraplan.resources import profiles_folder


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


def load_recipes() -> RecipeTable:
    """Return the bundled recipes."""
    path = profiles_folder() / "recipes.json"
    return validated(RecipeTable, read_object(path), where=str(path))
