"""Assigning GPUs to ranks so that every pair of ranks that needs a fast link has one: exact, by backtracking."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Masks = tuple[int, ...]


class _Search:
    """One search: who must reach whom, which GPUs and ranks are alike, and how many steps are left.

    A state is a list of domains, by rank the GPUs that it may have as bits.
    """

    def __init__(
        self,
        num_ranks: int,
        num_gpus: int,
        allowed: Mapping[tuple[int, int], Masks],
        ordered: Sequence[tuple[int, int]],
        *,
        max_steps: int,
    ) -> None:
        kinds = {masks: _Reach(masks) for masks in set(allowed.values())}
        self.neighbours: list[list[tuple[int, _Reach]]] = [[] for _ in range(num_ranks)]
        for (first, second), masks in allowed.items():
            if first != second:
                self.neighbours[first].append((second, kinds[masks]))
                self.neighbours[second].append((first, kinds[masks]))
        self.before: list[list[int]] = [[] for _ in range(num_ranks)]
        self.after: list[list[int]] = [[] for _ in range(num_ranks)]
        for low, high in ordered:
            self.after[low].append(high)
            self.before[high].append(low)
        self.twins = _twins(num_gpus, set(allowed.values()))
        self.everything = (1 << num_gpus) - 1
        self.uses_all = num_ranks == num_gpus
        self.num_ranks = num_ranks
        self.steps = 0
        self.max_steps = max_steps

    def extend(self, domains: list[int], fixed: int) -> list[int] | None:
        """Return `domains` narrowed to one GPU each, None where that is impossible or steps ran out.

        `fixed` are the ranks, as bits, whose only GPU the others know of. The rank with the fewest possible GPUs goes
        first, or the GPU that only two ranks may have, so that dead ends show early.
        """
        settled = self._narrowed(domains, fixed)
        if settled is None:
            return None
        if settled == (1 << self.num_ranks) - 1:
            return domains
        for rank, choice in self._branches(domains):
            self.steps += 1
            if self.steps > self.max_steps:
                return None
            state = domains.copy()
            state[rank] = choice
            found = self.extend(state, settled)
            if found is not None:
                return found
        return None

    def _branches(self, domains: list[int]) -> list[tuple[int, int]]:
        """Return the ways to go on, each a rank and its GPU as a bit; one of them is right if any order is."""
        once = twice = more = 0
        best, fewest, links = 0, 99, 0
        for rank, domain in enumerate(domains):
            more |= twice & domain
            twice |= once & domain
            once |= domain
            size = domain.bit_count()
            if 1 < size <= fewest:
                degree = len(self.neighbours[rank])
                if size < fewest or degree > links:
                    best, fewest, links = rank, size, degree
        pairs = twice & ~more
        if fewest > 2 and pairs and self.uses_all:
            gpu = pairs & -pairs
            return [(rank, gpu) for rank, domain in enumerate(domains) if domain & gpu]
        return [(best, 1 << gpu) for gpu in _bits(domains[best])]

    def _narrowed(self, domains: list[int], fixed: int) -> int | None:
        """Take out of `domains`, in place, what cannot be; return the ranks that are fixed, None at a dead end."""
        while True:
            changed = False
            for rank, domain in enumerate(domains):
                if not domain:
                    return None
                if domain & (domain - 1) == 0 and not fixed >> rank & 1:
                    fixed |= 1 << rank
                    self._settle(domains, rank, domain)
                    changed = True
            if changed:
                continue
            if not self._supported(domains):
                return None
            if not self._seated(domains):
                return None
            if all(domain & (domain - 1) or fixed >> rank & 1 for rank, domain in enumerate(domains)):
                return fixed

    def _seated(self, domains: list[int]) -> bool:
        """Give GPUs that only one rank may have to it where all are needed; False where there are too few GPUs."""
        once = twice = 0
        for domain in domains:
            twice |= once & domain
            once |= domain
        if once.bit_count() < self.num_ranks:
            return False
        lone = once & ~twice if self.uses_all else 0
        for rank, domain in enumerate(domains):
            if only := domain & lone:
                if only & (only - 1):
                    return False
                domains[rank] = only
        return True

    def _settle(self, domains: list[int], rank: int, bit: int) -> None:
        """Tell all others that `rank` has a GPU: it is taken, and likeness sets an order."""
        above = self.everything & -(bit << 1)
        twins = self.twins[bit.bit_length() - 1]
        keep_before, keep_after = ~(bit | twins & above), ~(bit | twins & (bit - 1))
        for other in range(rank):
            domains[other] &= keep_before
        for other in range(rank + 1, self.num_ranks):
            domains[other] &= keep_after
        for other in self.after[rank]:
            domains[other] &= above
        for other in self.before[rank]:
            domains[other] &= bit - 1

    def _supported(self, domains: list[int]) -> bool:
        """Take out GPUs that reach none of those left to a neighbour, until all do; False where none is left."""
        queue = (1 << self.num_ranks) - 1
        while queue:
            rank = (queue & -queue).bit_length() - 1
            queue &= queue - 1
            domain = domains[rank]
            for other, reach in self.neighbours[rank]:
                old = domains[other]
                new = old & reach.of(domain)
                if new != old:
                    if not new:
                        return False
                    domains[other] = new
                    queue |= 1 << other
        return True


class _Reach:
    """The GPUs that sets of GPUs reach over links of one kind, remembered."""

    def __init__(self, masks: Masks) -> None:
        self.masks = masks
        self.known: dict[int, int] = {}

    def of(self, domain: int) -> int:
        """Return the GPUs, as bits, that at least one of a domain reaches."""
        found = self.known.get(domain)
        if found is None:
            found = 0
            for gpu in _bits(domain):
                found |= self.masks[gpu]
            self.known[domain] = found
        return found


def find_assignment(
    num_ranks: int,
    num_gpus: int,
    allowed: Mapping[tuple[int, int], Masks],
    ordered: Sequence[tuple[int, int]] = (),
    *,
    max_steps: int,
    keeps_numbering: bool = False,
) -> tuple[tuple[int, ...] | None, int]:
    """Return a GPU for each rank, each GPU used once, and the steps that the search took.

    `allowed[a, b][g]` is the set of GPUs, as bits, that rank b may have while rank a has GPU g (symmetric in the GPUs);
    with a = b it says by bit g whether rank a may have GPU g. Pairs of ranks that are not named are free.
    Of a pair of ranks in `ordered` (by `ordered_pairs`) the first gets the GPU that is earlier: by number with
    `keeps_numbering`, else the one with fewer links, which is faster. None where there is no assignment; also where
    `max_steps` ran out, which the steps tell.
    """
    kinds = list(dict.fromkeys(allowed.values()))
    gpus = list(range(num_gpus))
    if not keeps_numbering:
        gpus.sort(key=lambda gpu: sum(masks[gpu].bit_count() for masks in kinds))
    renumbered = {masks: _renumbered(masks, gpus) for masks in kinds}
    masks_of = {pair: renumbered[masks] for pair, masks in allowed.items()}
    search = _Search(num_ranks, num_gpus, masks_of, ordered, max_steps=max_steps)
    domains = [(1 << num_gpus) - 1] * num_ranks
    for (first, second), masks in masks_of.items():
        if first == second:
            domains[first] &= sum(1 << gpu for gpu in range(num_gpus) if masks[gpu] >> gpu & 1)
    found = search.extend(domains, 0)
    if found is None:
        return None, search.steps
    return tuple(gpus[domain.bit_length() - 1] for domain in found), search.steps


def _renumbered(masks: Masks, gpus: Sequence[int]) -> Masks:
    return tuple(sum((masks[row] >> gpu & 1) << place for place, gpu in enumerate(gpus)) for row in gpus)


def _bits(mask: int) -> list[int]:
    found = []
    while mask:
        found.append((mask & -mask).bit_length() - 1)
        mask &= mask - 1
    return found


def _twins(num_gpus: int, kinds: set[Masks]) -> list[int]:
    """Return for each GPU the set of GPUs, as bits, that may be swapped with it without any link changing."""
    twins = [1 << gpu for gpu in range(num_gpus)]
    for first in range(num_gpus):
        for second in range(first + 1, num_gpus):
            if all(_alike(masks, first, second) for masks in kinds):
                twins[first] |= 1 << second
                twins[second] |= 1 << first
    return twins


def _alike(masks: Masks, first: int, second: int) -> bool:
    """Tell whether two GPUs reach the same others, and themselves and each other alike."""
    others = ~(1 << first | 1 << second)
    itself = masks[first] >> first & 1 == masks[second] >> second & 1
    each_other = masks[first] >> second & 1 == masks[second] >> first & 1
    return masks[first] & others == masks[second] & others and itself and each_other
