"""Shell scripts as people write them for clusters: what they write, which branches run, what starts their processes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from paraplan.api.imported import import_plan
from paraplan.cli.main import app
from paraplan.errors import PlanError
from paraplan.interop.sources.shell import command_of, without_documents
from paraplan.interop.sources.shell_arguments import with_arguments

JOB = r"""#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1     # one a node
#SBATCH --gres=gpu:8
NNODES=$SLURM_NNODES
GPUS_PER_NODE=8
MICRO=2
: "${TP:=4}"
if [[ ${SIZE:-7} == 7 ]]; then LAYERS=32; HIDDEN=4096
elif [[ $SIZE == 13 ]]; then LAYERS=40
else LAYERS=80
fi
config=./ds_config.json
cat <<EOT > $config
{"train_micro_batch_size_per_gpu": $MICRO, "layers": $LAYERS, "zero_optimization": {"stage": 1}, "it's": 1}
EOT
LAUNCHER="python -m torch.distributed.run --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES \
    --rdzv_endpoint $(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):6000"
#    --an-option-of-before \
EXTRA="$EXTRA --bf16"
CMD="pretrain_gpt.py --num-layers $LAYERS --hidden-size $HIDDEN --seq-length 2048 --micro-batch-size $MICRO \
    --global-batch-size 64 --tensor-model-parallel-size $TP $EXTRA"
clear; srun --jobid $SLURM_JOBID bash -c "$LAUNCHER --node_rank \$SLURM_PROCID $CMD" 2>&1 | tee -a log.txt
"""


def test_a_job_of_slurm_is_read_with_what_it_starts_and_where(read: Any) -> None:
    setup = read(JOB, "train.sh")
    assert setup.plan.describe() == "dp8 x tp4, DDP, micro-batch 2 x 4"
    assert setup.notes == ()
    words = command_of(without_documents(JOB, "train.sh")[0], "train.sh").words
    assert words[words.index("--num-layers") + 1] == "32"
    assert not {"--jobid", "tee", "--an-option-of-before", "$EXTRA"} & {*words}


def test_a_file_that_a_script_writes_is_the_one_that_its_command_reads(read: Any) -> None:
    script = re.sub(
        r"CMD=.*?\"\n", 'CMD="run_clm.py --deepspeed $config --per_device_train_batch_size 2"\n', JOB, flags=re.DOTALL
    )
    setup = read(script, "train.sh")
    assert setup.plan.describe() == "dp32, ZeRO-1, micro-batch 2 x 1"
    assert '"layers": 32' in without_documents(JOB, "train.sh")[1]["ds_config.json"]
    _, written = without_documents(JOB.replace("<<EOT", "<<'EOT'"), "train.sh")
    assert '"train_micro_batch_size_per_gpu": $MICRO' in written["ds_config.json"]


@pytest.mark.parametrize(
    ("condition", "taken"),
    [
        ("[[ $N == 4 ]]", "one"),
        ('[ "$N" = "4" ]', "one"),
        ("[ $N -le 4 ]", "one"),
        ("(( N > 4 ))", "both"),
        ("(( $N > 4 ))", "other"),
        ("[[ $N != 4 ]]", "other"),
        ("[ -z $UNKNOWN ]", "one"),
        ('[[ -n "${UNKNOWN}" ]]', "other"),
        ("[ -z $1 ]", "both"),
        ("[ $UNKNOWN = 4 ]", "both"),
        ("[ -n 4 ]", "one"),
        ("command -v nvcc", "both"),
    ],
)
@pytest.mark.parametrize("is_on_one_line", [False, True])
def test_of_branches_those_are_read_that_run(condition: str, taken: str, *, is_on_one_line: bool) -> None:
    then = "; then A=--one" if is_on_one_line else "\nthen\n  A=--one"
    script = f"N=4\nif {condition}{then}\nelse\n  B=--other\nfi\npython train.py $A $B --x\n"
    command = command_of(script, "train.sh")
    assert ("--one" in command.words, "--other" in command.words) == (taken != "other", taken != "one")
    assert bool(command.notes("train.sh")) == (taken == "both")


@pytest.mark.parametrize(("size", "plan"), [(7, "dp8"), (13, "dp2 x tp2 x pp2"), (70, "tp8")])
def test_an_if_on_one_line_is_that_on_several(read: Any, size: int, plan: str) -> None:
    script = f"""SIZE={size}
if [ $SIZE = 7 ]; then TP=1; PP=1; elif [ $SIZE = 13 ]; then TP=2; PP=2; else TP=8; PP=1; fi
[ $TP -gt 1 ] && SP="--sequence-parallel"
[[ $TP == 9 ]] && TP=4
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 40 --micro-batch-size 1 --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size $PP $SP
"""
    setup = read(script, "train.sh")
    assert setup.plan.describe().startswith(plan)
    assert setup.plan.sequence_parallel == (size > 7)
    assert setup.notes == ()


@pytest.mark.parametrize(
    ("start", "num_tasks"),
    [
        ("python", 1),
        ("/usr/bin/python3.11 -u", 1),
        ("torchrun --nproc-per-node 8", None),
        ("python -m torch.distributed.run", None),
        ("#SBATCH -N 2\n#SBATCH --ntasks-per-node 8\nsrun --mpi=pmix python", 16),
        ("#SBATCH --ntasks=12\nsrun -l python", 12),
        ("srun python", None),
    ],
)
def test_processes_without_a_launcher_are_those_of_python_or_slurm(start: str, num_tasks: int | None) -> None:
    command = command_of(f"{start} pretrain_gpt.py --num-layers 2\n", "train.sh")
    assert command.num_tasks == num_tasks
    assert not {"--mpi=pmix", "-l"} & {*command.words}


@pytest.mark.parametrize(
    ("words", "plan"),
    [
        ("", "dp8, DDP"),
        ("--deepspeed", "dp8, ZeRO-1"),
        ("--deepspeed --zero-stage 2", "dp8, ZeRO-2"),
        ("--deepspeed --zero-stage 0", "dp8, DDP"),
        ("--deepspeed --zero-stage 0 --bf16", "dp8, ZeRO-1"),
        ("--deepspeed --zero-stage 3 --cpu-optimizer", "dp8, ZeRO-3"),
        ("--zero-stage 3", "dp8, DDP"),
    ],
)
def test_megatron_deepspeeds_arguments_say_what_is_sharded(read: Any, words: str, plan: str) -> None:
    setup = read(f"torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 --micro-batch-size 1 {words}\n", "run.sh")
    assert setup.plan.describe().startswith(plan)
    assert (setup.plan.offload == "optimizer") == ("--cpu-optimizer" in words)


def test_a_scripts_own_arguments_stand_after_its_name(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(
        "TP=$1; PP=${2:-2}; BATCH=${11}\nNOW=$(date | cut -c1)\n"
        "torchrun --nproc_per_node 8 --master_addr $(scontrol show hostnames $NODES | head -n 1) pretrain_gpt.py \\\n"
        "  --num-layers 8 --micro-batch-size 1 --global-batch-size ${BATCH} --tensor-model-parallel-size $TP \\\n"
        "  --pipeline-model-parallel-size $PP --log `uname --all`\n"
    )
    words = ["4", "", *"abcdefgh", "32"]
    setup = import_plan(path, arguments=words).setup
    assert setup.plan.describe() == "tp4 x pp2, 1f1b, micro-batch 1 x 32"
    with pytest.raises(PlanError, match=r"--global-batch-size: expected a whole number, found '\$\{11\}'") as caught:
        import_plan(path, arguments=words[:4])
    assert "arguments" in str(caught.value.hint)
    result = CliRunner().invoke(app, ["import", str(path), *words])
    assert (result.exit_code, "tp4 x pp2" in result.stdout) == (0, True)
    assert "--show" not in result.stderr


RECIPE = """#!/bin/bash
#SBATCH --gres=gpu:8
MODEL=""; ARGS=""
while [[ $# -gt 0 ]]; do
  case $1 in
    -m|--model)
      MODEL="$2"
      shift 2
      ;;
    --stage=*) STAGE="${1#*=}"; shift ;;
    --tune) ARGS="$ARGS --use_peft"; shift;;
    *)
      echo "unknown: $1"
      exit 1
      ;;
  esac
done
CMD="src/recipes/sft.py --config recipes/$MODEL.yaml $ARGS"
LAUNCHER="ACCELERATE_LOG_LEVEL=info accelerate launch --config_file recipes/zero$STAGE.yaml --num_processes 16"
srun --nodes=2 bash -c "$LAUNCHER $CMD" 2>&1
"""
OPTIONS = """while getopts "m:s:t" opt; do
  case $opt in
    m) MODEL=$OPTARG ;;
    s) STAGE="${OPTARG}" ;;
    t) ARGS="--use_peft" ;;
    \\?) exit 1 ;;
  esac
done
accelerate launch --config_file=recipes/zero$STAGE.yaml --num_processes 16 scripts/run_sft.py recipes/$MODEL.yaml $ARGS
"""


@pytest.fixture
def recipes(tmp_path: Path) -> Path:
    folder = tmp_path / "recipes"
    folder.mkdir()
    (folder / "small.yaml").write_text(
        "model_name_or_path: a/b\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 3\nmax_length: 64\n"
        "dataset_name: c/d\nlog_level: info\n"
    )
    for stage in (2, 3):
        (folder / f"zero{stage}.yaml").write_text(
            f"distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: {stage}\nnum_processes: 8\n"
        )
    return tmp_path


@pytest.mark.parametrize(
    ("script", "words"),
    [
        pytest.param(RECIPE, ["-m", "small", "--stage=2", "--tune"], id="loop"),
        pytest.param(OPTIONS, ["-m", "small", "-s", "2", "-t"], id="getopts"),
    ],
)
def test_a_script_is_read_with_its_own_options_and_the_file_that_its_command_names(
    recipes: Path, script: str, words: list[str]
) -> None:
    path = recipes / "train.slurm"
    path.write_text(script)
    setup = import_plan(path, arguments=words).setup
    assert (setup.tool, setup.plan.describe()) == ("TRL, DeepSpeed", "dp16, ZeRO-2, micro-batch 2 x 3, recompute full")
    assert (setup.seq_length, setup.train) == (64, "lora:r=16,targets=q|v,dropout=0.05")
    plain = import_plan(path, arguments=[word.replace("2", "3") for word in words[:-1]]).setup
    assert (plain.plan.zero_stage, plain.train) == (3, None)
    with pytest.raises(PlanError, match=r"cannot read recipes/.*\$") as caught:
        import_plan(path)
    assert "its own arguments" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("command", "tool", "plan"),
    [
        ("axolotl train own.yml", "axolotl, DDP", "one process, micro-batch 2 x 4"),
        (
            "accelerate launch --num_processes 4 -m axolotl.cli.train own.yml --micro-batch-size 1",
            "axolotl, DDP",
            "dp4, DDP, micro-batch 1 x 4",
        ),
        (
            "accelerate launch --config_file recipes/zero3.yaml loop.py --lr 1e-4",
            "accelerate, DeepSpeed",
            "dp8, ZeRO-3, micro-batch 1 x 1",
        ),
        (
            "accelerate launch --use_fsdp --fsdp_sharding_strategy FULL_SHARD --num_processes 4 loop.py",
            "accelerate, FSDP",
            "dp4, ZeRO-3, micro-batch 1 x 1",
        ),
        (
            "torchrun --nproc_per_node 2 train.py --config recipes/small.yaml",
            "TRL, DDP",
            "dp2, DDP, micro-batch 2 x 3, recompute full",
        ),
    ],
)
def test_a_command_is_read_with_the_configuration_that_it_names(
    recipes: Path, command: str, tool: str, plan: str
) -> None:
    (recipes / "own.yml").write_text(
        "base_model: a/b\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\nsequence_len: 64\nlearning_rate: 1e-5\n"
    )
    (recipes / "run.sh").write_text(f"export A=1\n{command}\n")
    setup = import_plan(recipes / "run.sh").setup
    assert (setup.tool, setup.plan.describe()) == (tool, plan)


SKYPILOT = """name: own
resources:
  accelerators: H100:8
num_nodes: 2
envs:
  BS: 4
setup: |
  pip install trl
run: |
  torchrun --nproc_per_node=$SKYPILOT_NUM_GPUS_PER_NODE --nnodes=$SKYPILOT_NUM_NODES \\
    train.py --per_device_train_batch_size ${BS} --fsdp "full_shard auto_wrap"
"""
KUBERNETES = """kind: PyTorchJob
spec:
  template:
    containers:
    - name: pytorch
      env:
      - name: BS
        value: "4"
      command: [torchrun]
      args: [--nproc_per_node=8, --nnodes=2, train.py, --per_device_train_batch_size=$(BS), --fsdp, full_shard a]
"""
BEAKER = """tasks:
- name: own
  command: [/bin/sh, -c]
  arguments: ['
    unset A && B="1:$B" torchrun --nproc_per_node 8 --nnodes 2 train.py
    --per_device_train_batch_size 4 --fsdp full_shard
  ']
  datasets:
  - mountPath: /data
"""


@pytest.mark.parametrize("text", [SKYPILOT, KUBERNETES, BEAKER])
def test_of_a_jobs_file_the_command_is_read_that_it_starts(read: Any, text: str) -> None:
    setup = read(text, "job.yaml")
    assert (setup.tool, setup.plan.describe()) == (
        "transformers' Trainer, FSDP",
        "dp16, ZeRO-3, micro-batch 4 x 1",
    )
    assert not any("what starts the script" in note or "not known" in note for note in setup.notes)


def test_deepspeeds_file_may_leave_the_precision_to_accelerates(recipes: Path) -> None:
    (recipes / "ds.json").write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
    (recipes / "own.yaml").write_text(
        "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 4\n"
        "deepspeed_config: {deepspeed_config_file: ds.json}\n"
    )
    assert import_plan(recipes / "own.yaml").setup.precision == "bf16"


def test_a_text_over_several_lines_has_no_comments(recipes: Path) -> None:
    (recipes / "run.sh").write_text(
        'PROMPT="Think.  # step by step\n#### 42"\nARGS=(\n  --use_peft  # adapters\n  --lora_r 8\n)\n'
        'python sft.py --per_device_train_batch_size 2 --prompt "$PROMPT" "${ARGS[@]}"\n'
    )
    assert import_plan(recipes / "run.sh").setup.train == "lora:r=8,targets=q|v,dropout=0.05"


def test_what_accelerate_starts_without_training_is_refused(recipes: Path) -> None:
    (recipes / "run.sh").write_text("accelerate launch --config_file recipes/zero3.yaml examples/chatbot.py --x 1\n")
    with pytest.raises(PlanError, match="chatbot trains nothing"):
        import_plan(recipes / "run.sh")


def test_a_file_that_is_nobodys_is_named_as_such(recipes: Path) -> None:
    (recipes / "nobody.yaml").write_text("a: 1\n")
    (recipes / "run.sh").write_text("python train.py --config nobody.yaml\n")
    with pytest.raises(PlanError, match=r"^nobody\.yaml is not a configuration of DeepSpeed"):
        import_plan(recipes / "run.sh")


def test_megatron_deepspeeds_experts_go_over_the_ranks_it_names(read: Any) -> None:
    words = "--num-experts 16 --moe-expert-parallel-size 4 --deepspeed --micro-batch-size 1 --num-layers 2"
    setup = read(f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}\n", "run.sh")
    assert setup.plan.describe() == "dp8 x ep4, ZeRO-1, micro-batch 1 x 1"
    assert not any("token" in note or "expert" in note for note in setup.notes)


PIECES = st.sampled_from(
    [
        *"ab$\"'`\\#;|&<>(){}[]=\n \t",
        "EOF",
        "<<EOF\n",
        "\nEOF\n",
        "if ",
        "; then ",
        "\nfi\n",
        "else\n",
        "elif ",
        "$A",
        "${A:=1}",
        *("\nwhile [ $# -gt 0 ]; do\n", "\ncase $1 in\n", "-a) A=$2; shift 2 ;;", "\nesac\n", "\ndone\n", "*) shift;;"),
        *("[[ 1 == 1 ]]", "A=1\n", "--x 1 ", "bash -c '", "srun ", "> f ", "\\\n", "$((1+", "))", "python a.py "),
    ]
)


@settings(max_examples=400, deadline=None)
@given(pieces=st.lists(PIECES, max_size=25))
def test_any_text_is_a_command_or_is_refused_in_a_sentence(pieces: list[str]) -> None:
    text = "".join(pieces)
    refused, words, written = None, list[str](), dict[str, str]()
    try:
        script, written = without_documents(with_arguments(text, ["-a", "b"]), "train.sh")
        words = command_of(script, "train.sh").words
    except PlanError as error:
        refused = error
    assert refused is None or "train.sh" in refused.message
    assert all(isinstance(word, str) for word in words)
    assert all(len(body) <= len(text) * 50 + 50 for body in written.values())
