"""Why one plan beats another, in words."""

from __future__ import annotations

from paraplan.search.explain import part_words as part_words
