"""SkyPilot: a task that asks a cloud for the machines and runs `paraplan launch` on each.

Keys and variables as in SkyPilot's documentation: `resources.accelerators`, `num_nodes`, `workdir`, `run`,
`SKYPILOT_NODE_IPS`, `SKYPILOT_NUM_NODES`, `SKYPILOT_NODE_RANK`, `SKYPILOT_NUM_GPUS_PER_NODE`.
"""

from __future__ import annotations

from paraplan.interop.exported import Exported, Gap, Subject, launch_words, remarks, runtime_gap
from paraplan.interop.quoting import comment, to_yaml

# Names of `sky show-gpus`, from SkyPilot's documentation and its issue threads.
ACCELERATORS = {
    "a10": "A10",
    "a100-sxm-40gb": "A100",
    "a100-pcie-40gb": "A100",
    "a100-sxm-80gb": "A100-80GB",
    "a100-pcie-80gb": "A100-80GB",
    "a10g": "A10G",
    "b200-sxm-180gb": "B200",
    "gh200-96gb": "GH200",
    "h100-sxm-80gb": "H100",
    "h100-pcie-80gb": "H100",
    "h200-sxm-141gb": "H200",
    "l4": "L4",
    "l40": "L40",
    "l40s": "L40S",
    "mi300x-192gb": "MI300X",
    "p100-pcie-16gb": "P100",
    "rtx-3090": "RTX3090",
    "rtx-4090": "RTX4090",
    "t4": "T4",
    "v100-sxm2-16gb": "V100",
    "v100-sxm2-32gb": "V100-32GB",
}


def to_skypilot(subject: Subject) -> Exported:
    """Return a task file for `sky launch`; without a known GPU it names no accelerator and says so."""
    gaps, layout, gpu = runtime_gap(subject), subject.layout, subject.gpu
    accelerator = ACCELERATORS.get(gpu.name) if gpu is not None else None
    resources: dict[str, object] = {}
    if subject.needs_gpus and accelerator is not None:
        resources["accelerators"] = f"{accelerator}:{layout.gpus_per_node}"
    elif subject.needs_gpus:
        known = gpu.title if gpu is not None else "the GPUs of this plan"
        if subject.is_planned:
            gaps.append(Gap(part="machines", reason=f"SkyPilot's name of {known} is not known; set accelerators"))
    notes = [] if subject.is_planned else ["the kind of GPU: sky's option gpus, such as H100:8"]
    notes += [
        "paraplan: put a clone of its repository into ./paraplan, from where setup installs it",
        "the packages of the script: install them under setup",
        "data: under file_mounts",
    ]
    task: dict[str, object] = {
        "name": subject.name,
        "workdir": ".",
        "resources": resources,
        "num_nodes": layout.num_nodes,
        "setup": 'pip install "./paraplan[runtime]"',
        "run": _run(subject),
    }
    text = comment(remarks(subject, gaps, notes)) + to_yaml(task)
    return Exported(target="skypilot", text=text, gaps=tuple(gaps), notes=tuple(notes))


def _run(subject: Subject) -> str:
    ranks = '"$SKYPILOT_NUM_GPUS_PER_NODE"' if subject.needs_gpus else subject.layout.gpus_per_node
    return (
        'first_node=$(echo "$SKYPILOT_NODE_IPS" | head -n1)\n'
        "paraplan launch \\\n"
        '  --nnodes "$SKYPILOT_NUM_NODES" --node-rank "$SKYPILOT_NODE_RANK" \\\n'
        f"  --nproc-per-node {ranks} \\\n"
        '  --master-addr "$first_node" --master-port 29500 \\\n'
        f"  {launch_words(subject, plan_path=subject.path)}\n"
    )
