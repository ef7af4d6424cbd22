"""Rotary position embedding (Su et al. 2021) in the half-rotation convention of Hugging Face weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from meshwright.job.model_spec import ModelSpec


def inverse_frequencies(spec: ModelSpec, device: torch.device) -> Tensor:
    """``[head_size / 2]`` angles per position in float32, scaled as Llama 3.1 does when the model says so."""
    exponents = torch.arange(0, spec.head_size, 2, dtype=torch.int64, device=device).float() / spec.head_size
    frequencies = 1.0 / (spec.rope_theta**exponents)
    if spec.rope_scaling is None:
        return frequencies
    factor, low_factor, high_factor, original = spec.rope_scaling
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > original / low_factor, frequencies / factor, frequencies)
    smooth = (original / wavelengths - low_factor) / (high_factor - low_factor)
    smoothed = (1 - smooth) * scaled / factor + smooth * scaled
    medium = ~(wavelengths < original / high_factor) * ~(wavelengths > original / low_factor)
    return torch.where(medium, smoothed, scaled)


def rotary_tables(spec: ModelSpec, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every token's angles.

    The angles are float32 whatever the model's dtype, as in ``transformers``: the table is a constant of the
    architecture.

    Args:
        spec: the model.
        positions: ``[batch, sequence]``.
        dtype: of the result.

    Returns:
        Two tensors ``[batch, sequence, 1, head_size / 2]``.
    """
    frequencies = inverse_frequencies(spec, positions.device)
    angles = positions.float()[:, :, None, None] * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)
