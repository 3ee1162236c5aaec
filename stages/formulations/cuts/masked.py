"""Says what of memory and time counts where only a part of the step trains, and one plan serves whatever does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Key = tuple[int, int]


@dataclass(frozen=True)
class Mask:
    """What counts under one mask.

    Attributes:
        base_bytes: in memory throughout.
        counted: values by (value, cut), with cuts counted from 1, that are in memory under the mask if they are kept at
            the cut, unless they are made again later for what reads them under the mask. That takes the share of masks
            given here at least, beside the value's first run; 0 where nothing is certain of it.
        beside: by cut what the cut's node needs by itself, where it runs under the mask unless it runs again later.
    """

    base_bytes: int
    counted: Mapping[Key, float]
    beside: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Masks:
    """What counts under some of the masks.

    Attributes:
        masks: the masks.
        missed: by (value, cut) the share of masks under which what makes a value runs after a cut, if it is not kept.
        rerun_s: the time of each node that `missed` and `counted` speak of.
        late: nodes of forward by (node, cut) whose run for the results of forward may be one after the cut, with those
            that read them for these: one of them must be late too; none for what makes the results.
    """

    masks: Sequence[Mask] = ()
    missed: Mapping[Key, float] = field(default_factory=dict)
    rerun_s: Mapping[int, float] = field(default_factory=dict)
    late: Mapping[Key, frozenset[int]] = field(default_factory=dict)
