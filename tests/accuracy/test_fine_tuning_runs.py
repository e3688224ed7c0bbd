from __future__ import annotations

import pytest
from small_run import run

from paraplan.accuracy.fine_tuning import fine_tuning_optimizer, has_only_modelled_features
from paraplan.accuracy.measured_runs import MeasuredRun
from paraplan.accuracy.prediction import is_standard, predict_run
from paraplan.accuracy.run_workload import BundledData, plan_of_run, workload_of_run
from paraplan.cost.workload import Workload
from paraplan.errors import ParaplanError, PlanError
from paraplan.units import GIB

DATA = BundledData()
MISTRAL = {
    "gpu": "A100-80GB",
    "num_gpus": 1,
    "layers": 32,
    "hidden": 4096,
    "heads": 32,
    "kv_heads": 8,
    "ffn_hidden": 14336,
    "vocab": 32000,
    "activation": "swiglu",
    "tied_embeddings": False,
    "seq_len": 4096,
    "micro_batch": 8,
    "global_batch": 8,
    "recompute": "full",
    "flash_attention": True,
    "framework": "HF Trainer / TRL SFTTrainer + PEFT",
    "optimizer": "adamw_torch (HF default)",
    "memory_metric": "max_allocated",
    "lora_rank": 16,
    "lora_targets": "q k v o",
}


def peak_gib(measured: MeasuredRun) -> float:
    workload = workload_of_run(measured, DATA)
    found = predict_run(measured, workload, plan_of_run(measured, workload.framework))
    assert found.predicted_peak_memory_bytes is not None
    return found.predicted_peak_memory_bytes / GIB


# Peaks that fms-acceleration measured of Mistral-7B (scripts/benchmarks/refs/a100_80gb.csv), with what each row says.
@pytest.mark.parametrize(
    ("values", "measured"),
    [
        ({"method": "full", "base_weight_dtype": "bf16", "nonstandard_features": "pure bf16"}, 67.46),
        ({"method": "lora", "base_weight_dtype": "bf16", "nonstandard_features": "LoRA"}, 36.08),
        ({"method": "qlora", "base_weight_dtype": "nf4", "kernels": "FOAK; Liger"}, 20.27),
        (
            {
                "method": "qlora",
                "base_weight_dtype": "nf4",
                "nonstandard_features": "LoRA; nf4 base; HF prepare_model_for_kbit_training",
            },
            34.46,
        ),
        ({"method": "lora", "base_weight_dtype": "bf16", "kernels": "FOAK; Liger"}, 30.17),
    ],
)
def test_published_peaks_come_out_of_what_the_rows_say(values: dict[str, object], measured: float) -> None:
    assert peak_gib(run(**MISTRAL | values)) == pytest.approx(measured, rel=0.1)


def test_a_chunked_loss_that_is_compiled_holds_no_fp32_values() -> None:
    # torchtune's README (bd2a0fc): QLoRA of Llama 3.2 3B, 4.6 GiB of active memory.
    llama = {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 8, "ffn_hidden": 8192, "vocab": 128256}
    words = {"method": "qlora", "base_weight_dtype": "nf4 (torchao)", "kernels": "chunked cross-entropy"}
    words |= {"nonstandard_features": "LoRA; nf4 base; activation offload", "framework": "torchtune"}
    row = MISTRAL | llama | words | {"tied_embeddings": True, "micro_batch": 2, "global_batch": 2, "lora_rank": 8}
    row |= {"lora_targets": "q v o + MLP", "optimizer": "torch.optim.AdamW", "torch_compile": True}
    assert peak_gib(run(**row)) == pytest.approx(4.6, rel=0.1)
    assert peak_gib(run(**row | {"torch_compile": False})) > 5.3


def test_trls_loss_in_chunks_keeps_no_logits() -> None:
    words = {"method": "lora", "base_weight_dtype": "bf16", "kernels": "chunked cross-entropy", "vocab": 151936}
    row = run(**MISTRAL | words | {"framework": "FSDP2"})
    logits = 8 * 4096 * 151936 * 2
    assert (peak_gib(row) - peak_gib(row.replace(framework="TRL FSDP2"))) * GIB > 0.8 * logits


def test_activations_that_wait_on_the_host_are_told_by_the_words_of_tables() -> None:
    words = "checkpointed activations offloaded to host memory; ring attention of torch's context parallelism"
    plain = run(**MISTRAL | {"method": "lora", "base_weight_dtype": "bf16", "kernels": "chunked cross-entropy"})
    row = plain.replace(nonstandard_features=words)
    assert has_only_modelled_features(row)
    assert peak_gib(row) < peak_gib(plain)


def test_fine_tuning_rows_are_scored_where_all_that_is_unusual_is_modelled() -> None:
    known = run(method="qlora", nonstandard_features="LoRA; nf4 base (bitsandbytes); fused kernels (FOAK: RMSNorm)")
    assert has_only_modelled_features(known)
    assert is_standard(known)
    assert not is_standard(run(method="lora", nonstandard_features="LoRA; FP8 attention"))
    offloaded = {"method": "lora", "nonstandard_features": "LoRA; activation offload"}
    assert is_standard(run(**offloaded, offload="activations to CPU"))
    assert not is_standard(run(**offloaded, offload="parameters and optimizer to CPU"))
    assert not is_standard(run(nonstandard_features="LoRA"))


def test_columns_of_adapters_are_taken_in() -> None:
    base = run(**MISTRAL | {"method": "qlora", "base_weight_dtype": "gptq int4"})

    def made(**values: object) -> Workload:
        return workload_of_run(base.replace(**values), DATA)

    prepared = made(nonstandard_features="LoRA; HF prepare_model_for_kbit_training").training
    assert (prepared.base_weights, prepared.upcasts_frozen) == ("int4", False)
    adapter = made(lora_dropout=0.1).training.trainable.adapter
    assert adapter is not None
    assert adapter.dropout == 0.1
    ends = made(nonstandard_features="LoRA; embedding and head train too").training.trainable
    assert (ends.embeddings, ends.head) == (True, True)
    assert made(nonstandard_features="LoRA; pure bf16: adapters in bf16 too").training.precision == "bf16-pure"
    older = made(base_weight_dtype="nf4", nonstandard_features="LoRA; nf4 base; bitsandbytes before 0.43.2")
    assert older.training.stack.keeps_quantized_inputs


def test_a_method_that_is_not_modelled_is_said() -> None:
    with pytest.raises(PlanError, match="the method prefixtuning is not modelled"):
        workload_of_run(run(method="prefixtuning"), DATA)


def test_optimizers_are_read_from_their_words() -> None:
    assert fine_tuning_optimizer("adamw_torch (hf default)") == "adamw_foreach"
    assert fine_tuning_optimizer("adamw_bnb_8bit") == "adamw_8bit"
    assert fine_tuning_optimizer("bitsandbytes pagedadamw") == "paged_adamw"
    assert fine_tuning_optimizer("adamw_torch_fused") == "adamw"


def test_targets_of_tables_are_those_that_the_model_has() -> None:
    fused = workload_of_run(run(method="lora", lora_targets="c_attn", activation="swiglu"), DATA)
    assert "q|k|v" in fused.training.train
    every = workload_of_run(run(method="lora", lora_targets="all linear", activation="swiglu"), DATA)
    assert every.training.train == "lora:r=8"


@pytest.mark.parametrize("noted", ["LoRA; FP8", "FP8 (TE); LoRA"])
def test_lora_that_nvidia_times_is_on_queries_keys_and_values(noted: str) -> None:
    megatron = workload_of_run(run(framework="NeMo / Megatron-Core", nonstandard_features=noted), DATA)
    assert megatron.training.train == "lora:r=16,targets=qkv"
    automodel = workload_of_run(run(framework="NeMo AutoModel (FSDP2 + TE)", nonstandard_features=noted), DATA)
    assert automodel.training.train == "lora:r=8"


def test_memory_is_predicted_without_a_gpu_and_time_is_not() -> None:
    said = run(**MISTRAL | {"gpu": "unstated", "method": "lora", "nonstandard_features": "LoRA"})
    assert peak_gib(said) == peak_gib(said.replace(gpu="A100-80GB"))
    with pytest.raises(ParaplanError, match="unstated"):
        workload_of_run(said.replace(measured_step_time_s=1.0), DATA)


@pytest.mark.parametrize(
    ("words", "quantizer"),
    [
        ({}, "transformers-4"),
        ({"nonstandard_features": "LoRA; transformers 5.2"}, None),
        ({"kernels": "unsloth"}, "unsloth"),
        ({"nonstandard_features": "LoRA; quantize_moe_experts"}, "axolotl"),
        ({"framework": "Megatron-Bridge"}, None),
    ],
)
def test_rows_say_what_stored_their_base_and_are_of_transformers_4_where_they_do_not(
    words: dict[str, object], quantizer: str | None
) -> None:
    measured = run(**MISTRAL | {"method": "qlora", "base_weight_dtype": "nf4"} | words)
    assert workload_of_run(measured, DATA).training.quantizer == quantizer
