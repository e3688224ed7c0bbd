from __future__ import annotations

import json

import pytest

from paraplan.accuracy.trainer_logs import LoggedRun, read_trainer_log
from paraplan.errors import PlanError

RED, BLUE = "\x1b[31m", "\x1b[34m"
TORCHTITAN = "\n".join(
    f"[rank0]:[titan] 2025-08-01 10:00:00,000 - root - INFO - {RED}step: {step:2}  \x1b[32mloss:  7.1234  "
    f"\x1b[38;2;180;60;0mgrad_norm:  1.2345  \x1b[36mmemory: 29.33GiB(30.87%)  {BLUE}tps: {tps:,}  "
    "\x1b[38;2;54;234;195mtflops: 171.20  \x1b[35mmfu: 17.31%\x1b[39m"
    for step, tps in ((1, 512), (10, 3712), (20, 3702), (30, 3722))
)
"""Lines as `MetricsProcessor.log` writes them, with its colors."""
MEGATRON = """\
 [2025-04-13 23:41:12] iteration       10/    1000 | consumed samples:          160 | elapsed time per iteration (ms): \
1147.6 | learning rate: 0.000000E+00 | global batch size:    16 | loss scale: 8388608.0 | number of skipped \
iterations:  10 | number of nan iterations:   0 |
[Rank 0] (after 10 iterations) memory (MB) | allocated: 1464.33154296875 | max allocated: 1464.3408203125 | reserved: \
1576.0 | max reserved: 1576.0
 [2025-04-13 23:41:20] iteration       20/    1000 | consumed samples:          320 | elapsed time per iteration (ms): \
820.7 | learning rate: 4.000000E-05 | global batch size:    16 | lm loss: 1.072453E+01 | loss scale: 131072.0 |
 [2025-04-13 23:41:28] iteration       30/    1000 | consumed samples:          480 | elapsed time per iteration (ms): \
818.7 | throughput per GPU (TFLOP/s/GPU): 12.1 | learning rate: 4.000000E-05 | global batch size:    16 | lm loss: 9 |
"""
DEEPSPEED = """\
[2023-11-07 01:55:23,711] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=4, lr=[5e-05], mom=[(0.9, 0.95)]
[2023-11-07 01:55:23,714] [INFO] [timer.py:260:stop] epoch=0/micro_step=40/global_step=10, \
RunningAvgSamplesPerSec=25.025771473496132, CurrSamplesPerSec=25.704280480541442, MemAllocated=4.32GB, \
MaxMemAllocated=38.49GB
[2023-11-07 02:13:41,417] [INFO] [timer.py:260:stop] epoch=0/micro_step=1800/global_step=450, \
RunningAvgSamplesPerSec=25.72280894083983, CurrSamplesPerSec=25.6, MemAllocated=4.32GB, MaxMemAllocated=38.49GB
"""
STATE = {
    "global_step": 200,
    "max_steps": 200,
    "log_history": [
        {"loss": 2.1, "learning_rate": 1e-4, "epoch": 0.5, "step": 100},
        {"eval_loss": 2.0, "eval_runtime": 20.0, "eval_samples_per_second": 5.0, "step": 100},
        {"train_runtime": 420.0, "train_samples_per_second": 7.619, "train_steps_per_second": 0.476, "step": 200},
    ],
}


def step_s(found: LoggedRun, *, batch: int = 16) -> float:
    return found.step_s(global_batch_size=batch, seq_length=1024, num_gpus=4)


def test_torchtitans_tokens_a_second_are_those_of_one_gpu() -> None:
    found = read_trainer_log(TORCHTITAN, source="log")
    assert (found.trainer, found.num_times) == ("torchtitan", 3)
    assert step_s(found) == pytest.approx(16 * 1024 / (3712 * 4))


def test_megatrons_milliseconds_are_the_median_without_the_first() -> None:
    found = read_trainer_log(MEGATRON, source="log")
    assert (found.trainer, found.num_times, found.global_batch_size) == ("Megatron-LM", 2, 16)
    assert step_s(found) == pytest.approx(0.8197)
    assert found.peak_memory_bytes == round(1464.3408203125 * 2**20)
    with pytest.raises(PlanError, match="of steps of 16 sequences, and the plan has 32"):
        step_s(found, batch=32)


def test_deepspeeds_samples_are_those_of_the_global_batch() -> None:
    found = read_trainer_log(DEEPSPEED, source="log")
    assert (found.trainer, found.num_times) == ("DeepSpeed", 1)
    assert step_s(found) == pytest.approx(16 / 25.6)
    assert found.peak_memory_bytes == round(38.49 * 2**30)


def test_transformers_time_is_that_of_the_training_without_evaluations() -> None:
    found = read_trainer_log(json.dumps(STATE, indent=2), source="log")
    assert found.trainer == "transformers"
    assert step_s(found) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no line with a step time"),
        ("step 12/12  loss 3.507  0.1 steps/s", "has no line with a step time"),
        ("{", "is no trainer_state.json"),
        ('{"model_type": "llama"}', "is no trainer_state.json"),
        (json.dumps(STATE | {"log_history": STATE["log_history"][:2]}), "had not ended"),  # type: ignore[index]
        (json.dumps(STATE | {"log_history": [{"train_runtime": "long"}]}), "not a number"),
        (json.dumps(STATE | {"log_history": [{"train_runtime": 1.0}, {"eval_runtime": 2.0}]}), "2 s of evaluations"),
        (MEGATRON.splitlines()[0], "one line with a step time"),
        (MEGATRON + MEGATRON.replace("size:    16", "size:    32"), "steps of 16 and 32 sequences"),
        (MEGATRON.replace("820.7", "0.0").replace("818.7", "0.0"), "took no time"),
    ],
)
def test_what_says_nothing_is_one_sentence(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        read_trainer_log(text, source="my.log")
    assert caught.value.message.startswith(("my.log", "the log"))
    assert caught.value.hint
