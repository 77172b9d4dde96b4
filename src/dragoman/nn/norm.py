"""Normalisation of activations. To add one: a module that takes the width, and a line in NORMS."""

from collections.abc import Callable

from torch import nn

NORMS: dict[str, Callable[[int], nn.Module]] = {
    "layer": lambda width: nn.LayerNorm(width),
    "rms": lambda width: nn.RMSNorm(width, eps=1e-6),
    "none": nn.Identity,
}
