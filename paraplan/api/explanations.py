"""Why one plan beats another, in words."""

from __future__ import annotations

from paraplan.search.comparison import part_words as part_words
