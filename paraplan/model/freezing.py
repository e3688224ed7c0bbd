"""A model of which a part trains: frozen parameters as they are stored, adapters, and what is kept for the rest.

A linear layer keeps its input for the gradient of its weight alone. Where that is frozen the input is kept no longer,
except by an adapter, which reads it too; nor does a norm keep what only the gradient of its weight reads. Attention and
activations keep their own inputs and outputs all the same. Blocks before the first one that trains have no backward
pass. Within the first that does, gradients of inputs are counted everywhere.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from paraplan.errors import PlanError
from paraplan.model.expert_adapters import SUM_TRAFFIC, copied_experts, expert_adapter, expert_words, targeted_experts
from paraplan.model.part import Part, kept
from paraplan.model.quantizers import is_reached
from paraplan.model.spec import BlockRun, BlockSpec, ElementType, Layer, Matmul, ModelSpec, Parameter, SavedTensor
from paraplan.model.towers import is_of_tower
from paraplan.model.trainable import (
    AdapterSpec,
    InputCopy,
    Trainable,
    layer_matches,
    parse_trainable,
    targeted_layers,
    with_split_targets,
    without_qlora,
)
from paraplan.model.weight_formats import WeightFormat, is_quantized, stored_bytes

_ADAPTER_KERNELS: dict[InputCopy, int] = {"fused": 0, "shared": 4, "activation": 7, "fp32": 6}
"""Kernels that the forward pass of an adapter starts: two products, a factor and a sum, and the casts between them."""
_NORM_WORDS = ("norm", "ln_", "_ln", "ln.")


class FrozenStorage(NamedTuple):
    """How a training stores and reads what is frozen.

    `weights` is the format of those weights of blocks whose layers are `reached`, of all where that is None; embedding,
    head and what else is left have 16 bits, or fp32 where the linear layers do or `others_in_fp32` says so (peft's
    `prepare_model_for_kbit_training`). `input_copies` is what an
    adapter keeps of its input: what the layer read, or a copy of its own in the type of activations or in fp32.
    With `keeps_quantized_inputs` products of weights in four bits keep their inputs too; with `keeps_copies` those of
    quantized experts keep the copies in 16 bits that they read.
    """

    weights: WeightFormat = "bf16"
    others_in_fp32: bool = False
    input_copies: InputCopy = "activation"
    keeps_quantized_inputs: bool = False
    reached: frozenset[Layer] | None = None
    keeps_copies: bool = False

    @property
    def keeps_inputs(self) -> bool:
        """Whether linear layers of blocks keep their inputs, frozen as they are."""
        return self.keeps_quantized_inputs and is_quantized(self.weights)

    @property
    def others(self) -> WeightFormat:
        """The format of what is not a block's linear layer."""
        return "fp32" if self.others_in_fp32 or self.weights == "fp32" else "bf16"

    def format_of(self, parameter: Parameter) -> WeightFormat:
        """Return how a block's parameter is stored where it does not train."""
        if self.reached is None:
            return self.weights if len(parameter.shape) > 1 else self.others
        return self.weights if is_reached(parameter, self.reached) else self.others


def freeze(model: ModelSpec, trainable: Trainable, storage: FrozenStorage) -> ModelSpec:
    """Return the model of which `trainable` trains, the rest stored as `storage` says.

    Raises `PlanError` for adapters on layers that do not exist, a rank above a layer's size, and more last layers than
    there are.
    """
    if trainable.is_full:
        return model
    _check_towers(model, trainable)
    if model.is_partly_frozen:
        raise PlanError(
            f"{model.source} has frozen parameters already, and trains what their requires_grad says",
            hint="name a model of which all parameters train, or leave out what is to train of it",
        )
    _check_reached(model, storage)
    towers = tuple(one for one in model.embedding.parameters if is_of_tower(one))
    words = tuple(one for one in model.embedding.parameters if not is_of_tower(one))
    text = model.replace(embedding=model.embedding.replace(parameters=words))
    if not trainable.text_model:
        text = _freeze_text(text, trainable, storage)
    return _with_towers(text, towers, trainable, storage)


def _freeze_text(model: ModelSpec, trainable: Trainable, storage: FrozenStorage) -> ModelSpec:
    """Return the model without its towers, of which a part trains."""
    last = trainable.last_layers
    if last is not None and last > model.num_blocks:
        raise PlanError(f"layers:last{last}, and the model has {model.num_blocks}", hint="name fewer layers")
    head_trains = trainable.head or (trainable.embeddings and model.tied_embeddings)
    adapter = trainable.adapter
    targets = _targets(model, adapter)
    first = 0 if trainable.embeddings or adapter is not None or trainable.norms else model.num_blocks - (last or 0)
    blocks = []
    known: dict[tuple[int, bool], BlockSpec] = {}
    for place, block in enumerate(model.blocks):
        if last is not None and place >= model.num_blocks - last:
            blocks.append(block)
            continue
        kind = (id(block), place >= first)
        if kind not in known:
            here = {name for name in targets if any(one.name == name for one in block.matmuls)}
            known[kind] = _frozen_block(
                block,
                storage,
                adapter=adapter if here else None,
                targets=frozenset(here),
                trains_norms=trainable.norms,
                has_backward=place >= first,
            )
        blocks.append(known[kind])
    embedding_trains = trainable.embeddings or (trainable.head and model.tied_embeddings)

    def end(block: BlockSpec) -> BlockSpec:
        return block if adapter is None else _beside_original(block, storage)

    return model.replace(
        embedding=end(model.embedding) if embedding_trains else _frozen_end(model.embedding, storage),
        runs=tuple(BlockRun(block=block, count=len(list(same))) for block, same in groupby(blocks)),
        head=end(model.head) if head_trains else _frozen_end(model.head, storage, trains_norms=trainable.norms),
    )


def _check_towers(model: ModelSpec, trainable: Trainable) -> None:
    is_traced = any(run.block.is_traced for run in model.runs)
    names_parts = trainable.projector or trainable.tower or (trainable.text_model and is_traced)
    if names_parts and not model.towers:
        raise PlanError(
            f"--train {trainable.text}: {model.name} has no tower for pictures or sound that is read natively",
            hint="--train full trains all of it; leave out text, projector and tower",
        )


def _with_towers(
    model: ModelSpec, towers: tuple[Parameter, ...], trainable: Trainable, storage: FrozenStorage
) -> ModelSpec:
    """Return the model with its towers, frozen but for what trains of them. A frozen one has no backward pass."""
    trains = {"tower": trainable.tower, "projector": trainable.projector}

    def parameter(one: Parameter) -> Parameter:
        if trains[one.name.partition(".")[0]]:
            return one
        weights = storage.format_of(one) if one.layer == "linear" else storage.others
        return one.replace(frozen_bytes=stored_bytes(weights, one.shape or (1,)))

    def work(block: BlockSpec) -> BlockSpec:
        if trains[block.kind]:
            return block
        passes_on = block.kind == "projector" and trainable.tower
        narrow = storage.others != "fp32"
        return block.replace(
            matmuls=tuple(
                one.replace(trains=passes_on and one.of_activations, is_narrow=narrow) for one in block.matmuls
            ),
            saved=block.saved if passes_on else (),
            saved_fused=block.saved_fused if passes_on else (),
            has_backward=passes_on,
            before_freezing=block,
        )

    embedding = model.embedding.replace(parameters=(*model.embedding.parameters, *map(parameter, towers)))
    return model.replace(embedding=embedding, media=tuple(map(work, model.media)))


def linear_layers(block: BlockSpec) -> list[Matmul]:
    """Return the products of a block whose weights are those of linear layers, which adapters may stand beside."""
    weights = {one.name.removesuffix(".weight") for one in block.parameters if one.layer == "linear"}
    return [one for one in block.matmuls if one.name in weights]


def in_layers_of(model: ModelSpec, train: str) -> str:
    """Return the words of `--train` with the names that a model's own layers have for those that stand for several."""
    trainable = parse_trainable(without_qlora(train))
    names = tuple(one.name for run in model.runs for one in linear_layers(run.block))
    spread = with_split_targets(trainable, names)
    return train if spread == trainable else "q" * train.strip().startswith("qlora") + spread.text


def _check_reached(model: ModelSpec, storage: FrozenStorage) -> None:
    blocks = (parameter for run in model.runs for parameter in run.block.parameters)
    if storage.reached is not None and not any(is_reached(one, storage.reached) for one in blocks):
        raise PlanError(
            f"{storage.weights} is a format of {' and '.join(sorted(storage.reached))}, which {model.name} has none of",
            hint="use --base-weights nf4:double, which linear layers are stored in",
        )


def _targets(model: ModelSpec, adapter: AdapterSpec | None) -> frozenset[str]:
    """Return the names of the products with adapters, those of experts too."""
    if adapter is None:
        return frozenset()
    layers = {one.name: one for run in model.runs for one in linear_layers(run.block)}
    has_experts = model.num_experts > 1
    experts = targeted_experts(adapter, model.model_type) if has_experts else frozenset[str]()
    # Experts' layers are called as dense and shared ones are, and peft passes over names that nothing has.
    words = expert_words(adapter.targets) if has_experts else frozenset[str]()
    matched = tuple(word for word in words if any(layer_matches(word, name) for name in layers))
    others = tuple(word for word in adapter.targets if word not in words)
    wanted = (*others, *matched) if experts or others or matched else adapter.targets
    found = targeted_layers(adapter.replace(targets=wanted), tuple(layers))
    if adapter.kind != "ia3" and found:
        widest = max((layers[name] for name in sorted(found)), key=lambda one: min(one.k, one.n))
        most = min(widest.k, widest.n)
        if adapter.rank > most:  # above the few outputs of a router it is what peft makes, and harmless
            raise PlanError(
                f"a rank of {adapter.rank} is larger than {widest.name}, which is {widest.n} x {widest.k}",
                hint=f"use a rank of at most {most}",
            )
    return found | experts


def _frozen_end(block: BlockSpec, storage: FrozenStorage, *, trains_norms: bool = False) -> BlockSpec:
    frozen = tuple(
        one
        if trains_norms and _is_norm(one)
        else one.replace(frozen_bytes=stored_bytes(storage.others, one.shape or (1,)))
        for one in block.parameters
    )
    narrow = storage.others != "fp32"
    saved, fused = (
        tuple(one for one in tensors if not _is_for_weights(one, frozenset(), trains_norms=trains_norms))
        for tensors in (block.saved, block.saved_fused)
    )
    matmuls = tuple(one.replace(trains=one.of_activations, is_narrow=narrow) for one in block.matmuls)
    return block.replace(parameters=frozen, matmuls=matmuls, saved=saved, saved_fused=fused)


def _beside_original(block: BlockSpec, storage: FrozenStorage) -> BlockSpec:
    """Return an end that trains beside adapters: a copy of what peft leaves in place.

    (peft/utils/other.py, ModulesToSaveWrapper: `original_module` stays as it was.)
    """
    originals = tuple(
        one.replace(name=f"{one.name}.original", frozen_bytes=stored_bytes(storage.others, one.shape or (1,)))
        for one in block.parameters
        if len(one.shape) > 1
    )
    return block.replace(parameters=(*block.parameters, *originals))


def _is_norm(parameter: Parameter) -> bool:
    return any(word in parameter.name for word in _NORM_WORDS)


def _is_for_weights(tensor: SavedTensor, readers: frozenset[str], *, trains_norms: bool) -> bool:
    """Return whether a tensor is kept for gradients of weights that have none, and no adapter of `readers` reads it."""
    if tensor.weights_of is not None:
        return readers.isdisjoint(tensor.weights_of) and not (trains_norms and tensor.weights_of == ())
    return tensor.role == "head_input" or (tensor.role == "normalised" and not trains_norms)


def _frozen_block(
    block: BlockSpec,
    storage: FrozenStorage,
    *,
    adapter: AdapterSpec | None,
    targets: frozenset[str],
    trains_norms: bool,
    has_backward: bool,
) -> BlockSpec:
    parameters, each_bytes = [], {}
    for one in block.parameters:
        if trains_norms and _is_norm(one):
            parameters.append(one)
            continue
        weights = storage.format_of(one)
        size = stored_bytes(weights, one.shape or (1,))
        if weights == storage.weights:
            each_bytes[one.name.removesuffix(".weight")] = size / one.num_elements
        parameters.append(one.replace(frozen_bytes=size))
    quantizes, narrow = is_quantized(storage.weights) or storage.weights == "int8", storage.weights != "fp32"
    matmuls = [
        one.replace(
            trains=one.of_activations,
            is_narrow=narrow,
            quantized_bytes=each_bytes.get(one.name, _of_experts(each_bytes, one)) if quantizes else 0.0,
        )
        for one in block.matmuls
    ]
    added, traffic = Part(), 0.0
    for place, product in enumerate(matmuls):
        if product.num_experts == 1:
            continue
        if adapter is not None and product.name in targets:
            added += expert_adapter(product, adapter)
            matmuls[place] = product.replace(quantized_bytes=product.quantized_bytes + SUM_TRAFFIC)
        elif product.quantized_bytes and storage.keeps_copies:
            added += copied_experts(product)
    for layer in block.matmuls:
        if adapter is not None and layer.name in targets and layer.num_experts == 1:
            added += _adapter_part(layer, adapter, storage.input_copies)
            traffic += _adapter_traffic(layer, adapter, storage.input_copies)
    readers = _readers_of_inputs(matmuls, storage, adapter, targets)
    saved, fused = (
        tuple(one for one in tensors if not _is_for_weights(one, readers, trains_norms=trains_norms)) + more
        for tensors, more in ((block.saved, added.saved), (block.saved_fused, added.saved_fused))
    )
    return block.replace(
        parameters=(*parameters, *added.parameters),
        matmuls=(*matmuls, *added.matmuls),
        saved=saved if has_backward else (),
        saved_fused=fused if has_backward else (),
        has_backward=has_backward,
        adapter_kernels=_ADAPTER_KERNELS[storage.input_copies]
        * sum(one.num_experts == 1 for one in block.matmuls if one.name in targets),
        adapter_traffic_per_token=traffic,
        before_freezing=block,
    )


def _readers_of_inputs(
    matmuls: list[Matmul], storage: FrozenStorage, adapter: AdapterSpec | None, targets: frozenset[str]
) -> frozenset[str]:
    """Return the frozen layers whose inputs are kept.

    They are those that adapters share, those of experts with adapters, which are added to their weights, and those that
    are multiplied by weights in four bits where storage says so.
    """
    shares = storage.input_copies in ("shared", "fused") and adapter is not None and not adapter.dropout
    readers = targets if shares and adapter is not None and adapter.kind != "ia3" else frozenset[str]()
    readers |= {one.name for one in matmuls if one.num_experts > 1 and one.name in targets}
    return readers | {one.name for one in matmuls if storage.keeps_inputs and one.quantized_bytes}


def _of_experts(each_bytes: dict[str, float], matmul: Matmul) -> float:
    return next((size for name, size in each_bytes.items() if name.endswith(f".{matmul.name}")), 0.0)


def _adapter_traffic(matmul: Matmul, adapter: AdapterSpec, copies: InputCopy) -> float:
    """Return the bytes that the forward pass of an adapter moves for a token outside of its products.

    Counted in peft/tuners/lora/layer.py: the input cast to fp32 and by autocast back (6 bytes an element each), dropout
    (9), the output scaled (read and written) and added to the layer's (two reads, a write), and cast back from fp32.
    """
    if copies == "fused":
        return 0.0
    of_input = {"shared": 0.0, "activation": 12.0, "fp32": 6.0}[copies] + (9.0 if adapter.dropout else 0.0)
    of_output = 24.0 if copies == "fp32" else 10.0
    return of_input * matmul.k + of_output * matmul.n


def _adapter_part(matmul: Matmul, adapter: AdapterSpec, copies: InputCopy) -> Part:
    """Return the adapter of one linear layer: weights, products, and what it keeps."""
    name, entry = matmul.name, "tensor" if matmul.split == "row" else "sequence"
    k, n, rank = matmul.k, matmul.n, adapter.rank
    wide: ElementType = "fp32" if copies == "fp32" else "activation"
    output_dim = 0 if matmul.split == "column" else None
    if adapter.kind == "ia3":
        is_inner = matmul.split == "row"
        size, split = (k, "tensor") if is_inner else (n, "tensor" if matmul.split == "column" else "sequence")
        vector = Parameter(name=f"{name}.ia3_l", shape=(size,), tp_dim=0 if matmul.split != "none" else None)
        return Part(parameters=(vector,)) + kept("adapter_scaled", size, split=split, element_type=wide)  # type: ignore[arg-type]
    part = Part(
        parameters=(
            Parameter(name=f"{name}.lora_A.weight", shape=(rank, k), tp_dim=1 if matmul.split == "row" else None),
            Parameter(name=f"{name}.lora_B.weight", shape=(n, rank), tp_dim=output_dim),
        ),
        matmuls=(
            Matmul(name=f"{name}.lora_A", k=k, n=rank, split="row" if matmul.split == "row" else "none"),
            Matmul(name=f"{name}.lora_B", k=rank, n=n, split="column" if matmul.split == "column" else "none"),
        ),
    )
    if copies not in ("shared", "fused") or adapter.dropout:
        part += kept("adapter_input", k, split=entry, element_type=wide)  # type: ignore[arg-type]
    if adapter.dropout:
        part += kept("dropout_mask", k, split=entry, element_type="mask")  # type: ignore[arg-type]
    part += kept("adapter_inner", rank, element_type=wide)
    if adapter.kind == "dora":
        part += Part(parameters=(Parameter(name=f"{name}.lora_magnitude_vector", shape=(n,), tp_dim=output_dim),))
        output = "tensor" if matmul.split == "column" else "sequence"
        # The layer's output and the adapter's are both scaled by the magnitude (peft/tuners/lora/dora.py).
        scaled = kept("adapter_scaled", n, split=output, element_type=wide)  # type: ignore[arg-type]
        part += scaled + scaled
    return part
