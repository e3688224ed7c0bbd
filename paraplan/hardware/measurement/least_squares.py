"""Least squares with unknowns that cannot be negative, for the few columns of a fit of times."""

from __future__ import annotations

from itertools import combinations
from math import sqrt


def non_negative_least_squares(rows: list[list[float]], wanted: list[float]) -> list[float]:
    """Return x >= 0 that minimises |rows x - wanted|: the best of the solutions on each set of columns."""
    width = len(rows[0])
    best, best_error = [0.0] * width, sum(value * value for value in wanted)
    for count in range(1, min(width, len(rows)) + 1):
        for chosen in combinations(range(width), count):
            solution = _least_squares([[row[column] for column in chosen] for row in rows], wanted)
            if solution is None or min(solution) < 0:
                continue
            spread = [0.0] * width
            for column, value in zip(chosen, solution, strict=True):
                spread[column] = value
            errors = (
                sum(a * x for a, x in zip(row, spread, strict=True)) - b for row, b in zip(rows, wanted, strict=True)
            )
            error = sum(value * value for value in errors)
            if error < best_error:
                best, best_error = spread, error
    return best


def _least_squares(rows: list[list[float]], wanted: list[float]) -> list[float] | None:
    """Return x that minimises |rows x - wanted| by the normal equations; None where they do not determine it.

    Columns are scaled to length 1 first: they differ by nine orders of magnitude.
    """
    width = len(rows[0])
    scale = [sqrt(sum(row[column] ** 2 for row in rows)) for column in range(width)]
    scaled = [[row[column] / scale[column] for column in range(width)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(width)]
        + [sum(row[i] * value for row, value in zip(scaled, wanted, strict=True))]
        for i in range(width)
    ]
    for step in range(width):
        pivot = max(range(step, width), key=lambda row: abs(matrix[row][step]))
        matrix[step], matrix[pivot] = matrix[pivot], matrix[step]
        if abs(matrix[step][step]) < 1e-12:
            return None
        for row in range(width):
            if row != step:
                share = matrix[row][step] / matrix[step][step]
                matrix[row] = [a - share * b for a, b in zip(matrix[row], matrix[step], strict=True)]
    return [matrix[i][width] / matrix[i][i] / scale[i] for i in range(width)]
