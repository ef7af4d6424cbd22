"""How far from its peaks a device works: a few constants for each kind of operation. Data, not code, fills them in.

A matrix product ``[m, k] x [k, n]`` takes

    launch + 2 (m n + area_half) (k + depth_half) / (efficiency * peak)

``area_half`` is what part-filled waves of tiles cost (outputs of half a wave), ``depth_half`` what the start and the
end of a tile's inner loop cost; both vanish for large products, which reach ``efficiency`` of the peak.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

_Fraction = Annotated[float, Field(gt=0, le=1)]
_NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GemmCurve(_Part):
    """Matrix products of one type; see the module."""

    efficiency: _Fraction
    """Of the peak, for large products."""
    area_half: _NonNegative = 0.0
    """Output elements."""
    depth_half: _NonNegative = 0.0
    """Elements of the inner dimension."""


class AttentionCurve(_Part):
    """Fused attention: ``flops * (1 + length_half / sequence) / (efficiency * peak)``."""

    forward: _Fraction
    backward: _Fraction
    length_half: _NonNegative = 0.0
    """Tokens at which short sequences halve the rate."""


class Efficiency(_Part):
    """What a device reaches of its peaks."""

    gemm: dict[str, GemmCurve]
    """By type, as ``DeviceSpec.peak_flops``."""
    attention: AttentionCurve
    memory: _Fraction
    """Of the memory bandwidth, for norms, activation functions, the optimizer and all that streams."""
    launch: _NonNegative = 5e-6
    """Seconds of one kernel that the device cannot hide: its start and its tail."""
    dispatch: _NonNegative = 0.0
    """Seconds the host needs to issue one kernel: a floor when kernels are short."""
    link: _Fraction = 0.8
    """Of a link's bandwidth inside a node, for large collectives."""
    latency: _NonNegative = 7e-6
    """Seconds of one step of a collective inside a node, as fitted on whole steps."""
    network: _Fraction = 0.8
    """Of an adapter's bandwidth, for large collectives."""
    fitted_on: tuple[str, ...] = ()
    """The published measurements behind these constants; empty: none, the constants of a similar device."""
    note: str = ""
