# SPDX-License-Identifier: Apache-2.0
"""The ways a tensor is kept, by what they mean to a reader of the page."""

from __future__ import annotations

ROUNDED, SMALLER, MADE_AGAIN, SHARED, AS_IT_IS, ALIVE = (
    "rounded",
    "exact, smaller",
    "made again",
    "kept for another",
    "as it is",
    "alive anyway",
)

_FAMILIES = {
    "predicate": SMALLER,
    "bits": SMALLER,
    "mask": SMALLER,
    "indices": SMALLER,
    "geometry": SMALLER,
    "derived": MADE_AGAIN,
    "parameter copy": MADE_AGAIN,
    "shared": SHARED,
    "raw": AS_IT_IS,
    "passed": AS_IT_IS,
    "alive": ALIVE,
    "parameter": ALIVE,
}


def family_of(kind: str) -> str:
    """Of a kind that a report names: all other codecs round.

    >>> family_of("lossy"), family_of("derived")
    ('rounded', 'made again')
    """
    return _FAMILIES.get(kind, ROUNDED)
