"""Quantities of resources: the forms of ``resource.Quantity``, read as the whole number that a
device plugin needs, or in the thousandths in which a scheduler adds them up.

Used by the decoders, and by the modules that compare quantities. The API server has already refused
fractions and negative numbers for resources that the kubelet knows as extended, but it keeps each
user's spelling of the number (``"10k"``), and a stand-in, a webhook or a mirror pod may show
anything.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction

_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:\d+(?:\.\d*)?|\.\d+))(?:(?P<suffix>[KMGTPE]i|[numkMGTPE])|"
    r"[eE](?P<exponent>[+-]?\d{1,3}))?",
    re.ASCII,
)
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_LONGEST = 64  # characters; resource.Quantity itself stops at 63-bit numbers
_LARGEST = 2**63 - 1


def whole_number(text: str) -> int | None:
    """Return the quantity as a whole number from 0 to 2⁶³-1; None when it is not such a number."""
    if len(text) <= _LONGEST and text.isascii() and text.isdigit():
        number = int(text)  # nearly all of them are plain, and each change of a pod has a dozen
        return number if number <= _LARGEST else None
    value = _value(text)
    if value is None or value.denominator != 1 or not 0 <= value <= _LARGEST:
        return None
    return int(value)


def thousandths(text: str) -> int | None:
    """Return the quantity in thousandths, rounded up as schedulers do; None when it is not a
    quantity from 0 to 2⁶³-1.
    """
    value = _value(text)
    return math.ceil(value * 1000) if value is not None and 0 <= value <= _LARGEST else None


def _value(text: str) -> Fraction | None:
    found = _QUANTITY.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None:
        return None
    scale = Fraction(_BINARY.get(found["suffix"] or "", 1)) * Fraction(10) ** _DECIMAL.get(
        found["suffix"] or "", int(found["exponent"] or 0)
    )
    return Fraction(found["number"].lstrip("+")) * scale
