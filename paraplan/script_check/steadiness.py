"""Gradients that rounding, or the next run, changes much: which they are, and in which module that begins."""

from __future__ import annotations

from paraplan.script_check.evidence import NOISE_FACTOR, Process, Sight, distance, sizes_of

_LOOSE = 3e-3
"""Relative change of a gradient by rounding above which the answer says so."""
_REPEATED = 1e-6
"""Relative change from run to run of one process: sums of its kernels have one order."""
_AMPLIFIED = 3e-3
"""The part of a gradient's change by rounding that the output has of the module from which it comes."""


def changing(sight: Sight, step: int) -> set[str]:
    """Return parameters whose gradients changed from run to run of one process: optimizers may turn that into more."""
    if sight.again is None:
        return set()
    return {
        name
        for earlier in range(1, step + 1)
        for name, value in sight.alone.of(f"gradient/{earlier}").items()
        if distance(sight.again.of(f"gradient/{earlier}").get(name, value), value, 0.0) > _REPEATED
    }


def loose(sight: Sight) -> tuple[str, float] | None:
    """Return the gradient of which rounding alone changes most, and by what part of its size, where that is much."""
    expected, shaken = sight.alone.of("gradient/1"), sight.shaken.of("gradient/1")
    _, floor = sizes_of(expected)
    noises = {name: distance(shaken[name], value, floor) for name, value in expected.items() if name in shaken}
    name = max(noises, key=lambda name: noises[name], default="")
    if not name or noises[name] < max(_LOOSE, NOISE_FACTOR * sight.alone.record.rounding):
        return None
    return name, noises[name]


def why_loose(sight: Sight, name: str, noise: float) -> str:
    """Return why rounding changes the gradient of `name` by `noise` of its size."""
    again = sight.again
    repeated = again.of("gradient/1").get(name) if again is not None else None
    expected = sight.alone.of("gradient/1")[name]
    if again is not None and repeated is not None and distance(repeated, expected, 0.0) > _REPEATED:
        apart = distance(repeated, expected, 0.0)
        module = _first_unlike(sight.alone, again, _REPEATED)
        where = f"the output of {module} is the first that does" if module else "outputs do not: it is on the way back"
        return (
            f"the gradient of {name} changes by {apart:.2g} of its size from run to run of one process, and {where}: a "
            "kernel there is not deterministic, or draws numbers by other means than torch's. It is compared "
            "no closer, and later steps are not compared"
        )
    module = _first_unlike(sight.alone, sight.shaken, max(noise * _AMPLIFIED, sight.alone.record.rounding))
    where = f"something in {module}" if module else "something there"
    return (
        f"weights that are moved by rounding alone change the gradient of {name} by {noise:.2g} of its size: {where} "
        "chooses by small differences, as the largest of nearly equal scores; it is compared no closer than that"
    )


def _first_unlike(one: Process, other: Process, limit: float) -> str:
    """Return the first module inside of models whose output is another by `limit` of its size, "" for none."""
    for name, (squares, _, size) in one.record.outputs.items():
        others = other.record.outputs.get(name)
        if others is None:
            continue
        apart = abs(others[0] - squares) / max(squares, 1e-30), abs(others[2] - size) / max(size, 1e-30)
        if max(apart) > limit:
            return name
    return ""
