"""Precision of stored features: float32, or bfloat16 in half the memory."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

FeaturePrecision = Literal["float32", "bfloat16"]

NAN = np.uint16(0x7FC0)
"""The upper half of a float32 that is not a number."""


def stored(values: NDArray[np.float32], precision: FeaturePrecision) -> NDArray[np.float32] | NDArray[np.uint16]:
    """The values as they are stored: themselves, or the 16 bits of each as a bfloat16.

    A bfloat16 is the upper half of a float32: 8 bits of precision. Values are rounded to the nearest, ties to even, so
    a rounded value differs by at most 2⁻⁸ of itself, 0.39 %.
    """
    if precision == "float32":
        return values
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    upper = bits >> np.uint32(16)
    # Half a unit of the last place that is kept, and one bit less where the kept number is even.
    rounded = ((bits + (np.uint32(0x7FFF) + (upper & np.uint32(1)))) >> np.uint32(16)).astype(np.uint16)
    # Adding to a NaN could carry it over to a number.
    return np.where(np.isnan(values), NAN, rounded)
