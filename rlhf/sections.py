"""What every section of `pipeline.yaml` is made of: the strict base class and the bounded numbers."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1, le=10**9)]
Count = Annotated[int, Field(ge=0, le=10**9)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Open = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False)]
BelowHalf = Annotated[float, Field(ge=0, lt=0.5, allow_inf_nan=False)]
RoundName = Annotated[str, Field(pattern=r"^r[0-9]+(_[a-z0-9]+)*$")]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]
Betas = Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)]


class Section(BaseModel):
    """Base of every section: unknown keys are errors, types are not coerced, values do not change."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def divisors(n: int) -> str:
    """Every divisor of n, as a list to read."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return ", ".join(str(d) for d in sorted({*small, *(n // d for d in small)}))


def check_divides(small_name: str, small: int, large_name: str, large: int) -> None:
    """Raises ValueError with the numbers that would do."""
    if large % small:
        raise ValueError(
            f"{small_name}={small} does not divide {large_name}={large}; use one of {divisors(large)}"
        )
