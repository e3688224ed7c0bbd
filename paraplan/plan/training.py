"""Training apart from the model: batch, sequence, precision, optimizer."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, field_serializer, field_validator, model_validator

from paraplan.errors import PlanError
from paraplan.model.quantizers import quantizer_of
from paraplan.model.spec import ModelSpec, TowerKind
from paraplan.model.trainable import QLORA_WEIGHTS, Trainable, parse_trainable, without_qlora
from paraplan.model.weight_formats import WeightFormat, is_stored_below_16_bits
from paraplan.plan.stack import StackSettings
from paraplan.plan.task import Task, parse_task
from paraplan.records import Spec

ComputePrecision = Literal["fp32", "bf16", "fp16"]
TrainingPrecision = Literal["fp32", "bf16", "fp16", "bf16-pure"]
OptimizerName = Literal[
    "adamw",
    "adamw_foreach",
    "adamw_8bit",
    "adamw_4bit",
    "paged_adamw",
    "paged_adamw_8bit",
    "lion",
    "lion_8bit",
    "adafactor",
    "muon",
    "sgd_momentum",
    "sgd",
    "schedule_free_adamw",
    "schedule_free_sgd",
    "galore_adamw",
]
AttentionKind = Literal["flash", "sdpa", "eager"]
LinearPrecision = Literal["16bit", "fp8", "mxfp8", "nvfp4"]
Fp8Recipe = Literal["delayed", "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"]
"""How 8-bit operands are scaled, in the words of Transformer Engine, Megatron-LM and torchao: by a tensor's maxima of
earlier steps, by its own, by those of its rows, of rows with gradients of weights in 16 bits, or of blocks."""
TORCHAO_RECIPES: tuple[Fp8Recipe, ...] = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""Recipes of torchao's float8 linear layers (`Float8LinearRecipeName`)."""
LossKernel = Literal["plain", "chunked", "liger", "cut"]
MOST_LOAD = 1_000_000
"""No rank of experts has more than the rows of as many ranks as there may be."""
_OPTIMIZER_ALIASES: dict[str, OptimizerName] = {
    "adam": "adamw",
    "adamw_torch": "adamw_foreach",
    "adamw_torch_fused": "adamw",
    "adamw_fused": "adamw",
    "adamw_bnb_8bit": "adamw_8bit",
    "adam_8bit": "adamw_8bit",
    "paged_adamw_32bit": "paged_adamw",
    "adamw_torch_4bit": "adamw_4bit",
    "adamw_torch_8bit": "adamw_8bit",
    "lion_32bit": "lion",
}
"""Names of transformers' `--optim` (`OptimizerNames` in training_args.py) and of the libraries behind them."""


def optimizer_name(text: str) -> OptimizerName:
    """Return the optimizer that a name stands for. Raises `PlanError` for one that is not known."""
    words = text.strip().lower().replace("-", "_")
    known: tuple[OptimizerName, ...] = get_args(OptimizerName)
    for name in known:
        if words == name:
            return name
    if words not in _OPTIMIZER_ALIASES:
        raise PlanError(
            f"the optimizer {text!r} is not known",
            hint=f"use {', '.join(known)}, or a name of transformers' --optim such as adamw_torch or adamw_bnb_8bit",
        )
    return _OPTIMIZER_ALIASES[words]


_ENCODED: dict[TowerKind, str] = {"image": "pictures", "audio": "sound"}


class TrainingSpec(Spec):
    """One training step as the user wants it, whatever the plan."""

    global_batch_size: int = Field(gt=0)
    """Sequences of one optimizer step over all ranks."""
    seq_length: int = Field(gt=0)
    """Tokens of a sequence."""
    precision: TrainingPrecision = "bf16"
    """bf16 and fp16 are mixed: matmuls and activations in 16 bits, optimizer state and master weights in fp32.
    bf16-pure: weights, gradients and optimizer state in bf16 too."""
    linear_precision: LinearPrecision = "16bit"
    """Precision of products and kept inputs of linear layers: as `precision` says, in 8 bits scaled by
    tensor or block (fp8) or by 32 elements (mxfp8), or in 4 bits scaled by 16 (nvfp4). All else stays as it is."""
    fp8_recipe: Fp8Recipe | None = None
    """How operands in fp8 are scaled; None: as the framework does by default."""
    fp8_gather: bool = False
    """Weights of blocks are gathered in 8 bits, cast on their shards: torchtitan's enable_fsdp_float8_all_gather,
    Megatron-LM's --fp8-param-gather."""
    optimizer: OptimizerName = "adamw"
    """Decides the bytes of state for each parameter."""
    attention: AttentionKind = "sdpa"
    """The attention kernel: flash-attention, torch's scaled_dot_product_attention, or all scores written out."""
    compiled: bool = False
    """True where torch.compile compiles the model's repeated blocks; what stands around them is not compiled."""
    train: str = "full"
    """Trained part of the model, in the words of `--train`: full, lora:r=16,targets=q|v, head, layers:last4, ...;
    qlora is lora over base weights in nf4:double."""
    base_weights: WeightFormat | None = None
    """How frozen linear layers are stored. None: in the type that matmuls compute in."""
    quantizer: str | None = None
    """Library that stores them below 16 bits, which decides whether experts are (`profiles/quantizers.json`).
    None: what the framework has, for most of them transformers 5."""
    expert_load: Annotated[float, Field(ge=1, le=MOST_LOAD)] | Literal["trained"] | None = None
    """Rows of the busiest rank of experts over the mean of all ranks. None: what
    routers usually leave, more of it the fewer experts a rank has. "trained": what those of a released model leave on
    the text of a fine-tuning, which is also taken where an adapter, a task or samples that are padded tell of one. 1
    where benchmarks force an even load. Where a capacity factor drops what is over it, at most that; where rows are
    padded to it, that. Ranks that have all experts (`ep` 1) have the rows of their own tokens."""
    upcasts_frozen: bool = False
    """Frozen weights that are not quantized are in fp32, and with them the residual stream: what peft's
    prepare_model_for_kbit_training does."""
    loss: LossKernel = "plain"
    """plain: cross-entropy on all logits. chunked: on an eighth of the tokens after the other (torchtune). liger: head
    and loss in chunks, gradients with them (Hsu et al. 2024). cut: no logits at all (Wijmans et al. 2024)."""
    offloads_activations: bool = False
    """True where activations of blocks go to the host's memory, and come back, beside compute (torchtune's
    and TRL's activation offloading)."""
    task: str = "sft"
    """Objective, in the words of `--task`: sft, dpo, dpo:precomputed, orpo, kto, reward, grpo, embedding, reranker.
    The sequences of a batch are counted one by one, those of pairs and generated ones too."""

    sample_length: int | None = Field(default=None, gt=0)
    """Mean tokens of a sample, which is padded to its sequence; None where samples fill their sequences. Of what is
    computed of padded ones only the load of experts depends on it."""
    image_tokens: int = Field(default=0, ge=0)
    """Tokens of a sequence that are pictures or frames of video, which a tower encodes (`--image-tokens`)."""
    audio_tokens: int = Field(default=0, ge=0)
    """Tokens of a sequence that are sound (`--audio-tokens`)."""
    packs_samples: bool = False
    """Samples stand in sequences one behind the other, and FlashAttention has each attend to its own tokens alone;
    other kernels compute all scores of a sequence and mask them."""

    stack: StackSettings = StackSettings()
    """Settings of the framework's software."""

    @field_serializer("stack")
    def _told(self, stack: StackSettings) -> dict[str, Any]:
        return stack.model_dump(exclude_defaults=True)

    @model_validator(mode="before")
    @classmethod
    def _with_qlora(cls, values: Any) -> Any:
        """`qlora` is LoRA over weights in NF4, in the words of those who train it; other 4-bit weights may be named."""
        if not isinstance(values, dict) or not isinstance(train := values.get("train"), str):
            return values
        words, stored = without_qlora(train), values.get("base_weights")
        if words == train.strip():
            return values
        if stored in ("bf16", "fp32"):
            raise PlanError(
                f"--train {train} with base weights in {stored}: QLoRA is LoRA over weights of fewer than 16 bits",
                hint=f"use --train {words}, or leave out --base-weights",
            )
        return values | {"train": words, "base_weights": stored or QLORA_WEIGHTS}

    @field_validator("task")
    @classmethod
    def _is_known_task(cls, text: str) -> str:
        return parse_task(text).text

    @field_validator("quantizer")
    @classmethod
    def _is_known_quantizer(cls, name: str | None) -> str | None:
        return None if name is None else quantizer_of(name).name

    @field_validator("train")
    @classmethod
    def _is_known(cls, text: str) -> str:
        return parse_trainable(text).text

    @model_validator(mode="after")
    def _has_mixed_precision(self) -> Self:
        if self.linear_precision != "16bit" and self.precision == "fp32":
            raise PlanError(
                f"linear layers in {self.linear_precision} stand beside 16-bit activations, and the precision is fp32",
                hint="use --precision bf16, or leave out --linear-precision",
            )
        return self

    @model_validator(mode="after")
    def _has_8bit_operands(self) -> Self:
        if self.fp8_gather and self.linear_precision not in ("fp8", "mxfp8"):
            raise PlanError(
                f"weights gathered in 8 bits stand beside linear layers in {self.linear_precision}",
                hint="add --linear-precision fp8, or leave out --fp8-gather",
            )
        if self.fp8_gather and self.fp8_recipe in ("rowwise", "rowwise_with_gw_hp"):
            raise PlanError(
                f"weights scaled {self.fp8_recipe} have no scale that both of their products share, so that shards "
                "cannot be cast",
                hint="use --fp8-recipe tensorwise, or leave out --fp8-gather",
            )
        if self.fp8_recipe is not None and self.linear_precision != "fp8":
            raise PlanError(
                f"fp8 operands scaled {self.fp8_recipe} stand beside linear layers in {self.linear_precision}",
                hint="add --linear-precision fp8, or leave out --fp8-recipe",
            )
        return self

    @model_validator(mode="after")
    def _has_frozen_weights(self) -> Self:
        if self.base_weights is not None and self.train == "full":
            raise PlanError(
                f"base weights in {self.base_weights} are frozen, and nothing is where all parameters train",
                hint="add --train lora:r=16, or leave out --base-weights",
            )
        return self

    @model_validator(mode="after")
    def _has_weights_to_multiply(self) -> Self:
        stored = self.base_weights
        if self.linear_precision == "16bit" or stored is None or stored == "fp8" or not is_stored_below_16_bits(stored):
            return self
        raise PlanError(
            f"weights in {stored} are multiplied in 16 bits once they are dequantized, not in {self.linear_precision}",
            hint="leave out --linear-precision, or --base-weights",
        )

    @model_validator(mode="after")
    def _has_samples_to_pack(self) -> Self:
        if self.packs_samples and self.sample_length is None:
            raise PlanError("how long the samples are that are packed is not known", hint="add --sample-len 600")
        return self

    @model_validator(mode="after")
    def _has_whole_pairs(self) -> Self:
        group = parse_task(self.task).group
        if self.global_batch_size % group:
            raise PlanError(
                f"{self.global_batch_size} sequences are no pairs, which {self.task} learns from",
                hint=f"use --global-batch {self.global_batch_size + 1}: chosen and rejected sequences count apart",
            )
        return self

    @property
    def media_tokens(self) -> dict[TowerKind, int]:
        """Tokens of a sequence by what a tower encodes to make them."""
        return {"image": self.image_tokens, "audio": self.audio_tokens}

    @property
    def padding_share(self) -> float:
        """The share of a batch's tokens that pad samples to their sequences; longer samples are cut."""
        if self.packs_samples:
            return 0.0
        return 1.0 - min(self.sample_length or self.seq_length, self.seq_length) / self.seq_length

    @property
    def stated_load(self) -> float | None:
        """The load of the busiest rank of experts where it is a number."""
        return None if self.expert_load == "trained" else self.expert_load

    @property
    def tunes_trained(self) -> bool:
        """Whether what trains is a model that was trained before, as far as `expert_load` asks."""
        tells = self.train != "full" or self.task != "sft" or self.sample_length is not None
        return self.expert_load == "trained" or (self.expert_load is None and tells)

    @property
    def packed_samples(self) -> float:
        """Samples that stand in a sequence on average and are told apart; 0 where none are."""
        apart = self.packs_samples and self.attention == "flash" and self.sample_length is not None
        return max(1.0, self.seq_length / (self.sample_length or 1)) if apart else 0.0

    @property
    def attended_length(self) -> int:
        """Tokens of a text whose tokens attend to one another: of a sequence, or of a sample of packed ones."""
        return min(self.sample_length or self.seq_length, self.seq_length) if self.packed_samples else self.seq_length

    @property
    def trainable(self) -> Trainable:
        """Trained part of the model."""
        return parse_trainable(self.train)

    @property
    def learns_from(self) -> Task:
        """Objective of a step."""
        return parse_task(self.task)

    @property
    def copies_reference(self) -> bool:
        """Whether a second copy of the model is held as the reference: under adapters the base model is one."""
        return self.learns_from.has_reference and self.trainable.adapter is None

    @property
    def compute_precision(self) -> ComputePrecision:
        """The type that matmuls compute in."""
        return "bf16" if self.precision == "bf16-pure" else self.precision

    @property
    def frozen_weights(self) -> WeightFormat:
        """How frozen linear layers are stored."""
        return self.base_weights or ("fp32" if self.precision == "fp32" else "bf16")

    @property
    def gathered_share(self) -> float:
        """Bytes that ranks gather of a block's weights, relative to the type of activations."""
        return 0.5 if self.fp8_gather else 1.0

    @property
    def title(self) -> str:
        """How a step computes, for people: "bf16, adamw, sdpa attention"."""
        compiled = ", compiled blocks" if self.compiled else ""
        by = f" of {self.quantizer}" if self.quantizer and self.base_weights else ""
        base = f" on {self.base_weights} weights{by}" if self.base_weights else ""
        trained = "" if self.train == "full" else f", {self.train}{base}"
        loss = "" if self.loss == "plain" else f", {self.loss} loss"
        words = [word for word in (self.fp8_recipe, "gathered so" if self.fp8_gather else None) if word]
        recipe = f" ({', '.join(words)})" if words else ""
        narrow = "" if self.linear_precision == "16bit" else f", linear layers in {self.linear_precision}{recipe}"
        loss += "" if self.task == "sft" else f", {self.task}"
        loss += ", activations on the host" if self.offloads_activations else ""
        loss += "".join(f", {count} {kind} tokens a sequence" for kind, count in self.media_tokens.items() if count)
        loss += f", {self.stack.text}" if self.stack.text else ""
        return f"{self.precision}{narrow}, {self.optimizer}, {self.attention} attention{compiled}{trained}{loss}"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def activation_bytes(self) -> int:
        """Bytes of one activation element."""
        return 4 if self.precision == "fp32" else 2


def training_notes(model: ModelSpec, training: TrainingSpec) -> tuple[str, ...]:
    """Return what to know of a training that is no mistake: long sequences, and towers whose work nobody counted."""
    idle = [tower.kind for tower in model.towers if not training.media_tokens[tower.kind]]
    notes = tuple(
        f"the tower for {_ENCODED[kind]} is counted without work: --{kind}-tokens says how many tokens of a sequence "
        "it makes"
        for kind in idle
    )
    longest = model.max_seq_length
    if longest is None or training.seq_length <= longest or model.has_learned_positions:
        return notes
    return (
        *notes,
        f"sequences of {training.seq_length} tokens are longer than the {longest} that {model.name} was made for: "
        "positions are computed and go on, but the model has not learned them; a config with rope scaling says that it "
        "has",
    )
