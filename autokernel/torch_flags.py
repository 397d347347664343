"""Torch's flags for what float32 work may run at: a user's own go wherever that work is timed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tf32:
    """Whether float32 work may run in TF32; the defaults are torch's own."""

    products: bool = False
    convolutions: bool = True

    def allows(self, family: str) -> bool:
        """Whether a region of this family may."""
        return self.convolutions if family == "conv" else self.products


BY_DEFAULT = Tf32()


def tf32() -> Tf32:
    """What the flags, as they are now, let run in TF32."""
    import torch

    own, cudnn = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn
    products = getattr(torch.backends, "fp32_precision", own) if own == "none" else own
    return Tf32(products == "tf32", cudnn.conv.fp32_precision == "tf32")  # pyright: ignore[reportAttributeAccessIssue]


def set_tf32(wanted: Tf32) -> None:
    """Set the flags so. One that stands so already is left alone: torch refuses to read them once its two
    ways of setting them were mixed."""
    import torch

    now = tf32()
    if now.products != wanted.products:
        torch.backends.cuda.matmul.allow_tf32 = wanted.products
    if now.convolutions != wanted.convolutions:
        torch.backends.cudnn.allow_tf32 = wanted.convolutions
