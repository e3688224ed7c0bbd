"""Suggestions for the name of a machine that no profile has."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection

from paraplan.errors import near_names
from paraplan.hardware.catalogue.composed_machines import LONGEST_NAME, counted_gpus, plain_name

OTHER_WAYS = (
    "give a name of paraplan profiles list or a number of GPUs (8xh100, 4xrtx-3090); paraplan explain machines says "
    "how to describe another machine"
)
_COUNTED_PART = re.compile(r"(?<![a-z0-9.])(?P<count>[1-9]\d{0,2})-?x-?(?P<gpu>[a-z0-9][a-z0-9-]*)")
_OTHERS = {
    "Apple's GPUs": r"(\d+x)?(mps|metal|apple.*|m[1-9](-?(pro|max|ultra))?)",
    "TPUs": r"(cloud-)?tpu.*|v[2-6][ep]?-\d+",
    "accelerators of Intel, AWS and Huawei": (
        r"(\d+x)?(gaudi.*|hpu.*|xpu.*|dl1\..*|trn\d.*|trainium.*|inf\d.*|ascend.*|npu.*)"
    ),
}
"""How people call what is no GPU of NVIDIA's or AMD's."""
_NUMBERS = re.compile(r"\d+")


def machine_hint(name: str, *, machines: Collection[str], gpus: Collection[str]) -> str:
    """Return the hint for a name that neither `machines` nor `gpus` with a number before them have.

    In this order: a larger size of the same cloud machine, GPUs that the name counts, names that look alike.
    """
    words = plain_name(name)
    if len(words) > LONGEST_NAME:
        return OTHER_WAYS
    return _larger_size(words, machines) or _counted(words, gpus) or _alike(words, machines)


def other_maker(name: str) -> str | None:
    """Return who makes what is called `name`, None where that may be a GPU of NVIDIA's or AMD's."""
    return next((who for who, pattern in _OTHERS.items() if re.fullmatch(pattern, name)), None)


def gpu_key(name: str) -> str:
    """Return the name of a kind of GPU without punctuation and the generation of its socket: `H100-SXM5`, `rtx4090`."""
    return re.sub(r"sxm\d", "sxm", re.sub(r"[^a-z0-9]", "", name.lower()))


def _larger_size(words: str, machines: Collection[str]) -> str | None:
    """Return the hint for a name such as `g5.2xlarge` that differs from a machine's in numbers alone."""
    pattern, is_cloud = _NUMBERS.sub("", words), re.search(r"xlarge$|-\d+g$|^n[cdv]\d", words)
    sizes = [one for one in machines if _NUMBERS.sub("", one) == pattern and one != words]
    if not is_cloud or not sizes:
        return None
    near = difflib.get_close_matches(words, sorted(sizes), n=1, cutoff=0)[0]
    return f"say --profile {near} --gpus-per-node N, with N the GPUs of the size that you mean"


def _counted(words: str, gpus: Collection[str]) -> str | None:
    """Return the hint for a name that holds a number of GPUs, such as `gpu-8x-h100-sxm5` and `8xh10`."""
    part = _COUNTED_PART.search(words)
    count, gpu = (part["count"], part["gpu"]) if part else counted_gpus(words) or (None, "")
    keys = {gpu_key(one): one for one in sorted(gpus)}
    tokens = gpu.split("-")
    for end in range(len(tokens), 0, -1):
        known = keys.get(gpu_key("".join(tokens[:end])))
        if known is not None:
            return f"did you mean {count}x{known}?"
    if count is None:
        return None
    near = [f"{count}x{one}" for one in difflib.get_close_matches(gpu, sorted(gpus), n=2, cutoff=0.7)]
    first = f"did you mean {' or '.join(near)}?" if near else "paraplan profiles list --kind gpu shows all kinds;"
    return f"{first} paraplan explain machines says how to describe another"


def _alike(words: str, machines: Collection[str]) -> str:
    hint = near_names(words, machines)
    return OTHER_WAYS if hint.startswith("known") else hint
