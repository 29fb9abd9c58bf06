"""TorchTitan's flex attention on Foveate: ``foveate.torchtitan.register()``."""

from __future__ import annotations

from ._blocks import create_block_mask
from ._flex import flex_attention

__all__ = ["register"]


def register() -> None:
    """Makes models of TorchTitan with ``attn_type="flex"`` attend with Foveate, and their masks its masks.

    Raises:
        ImportError: There is no TorchTitan 0.2.2, or it cannot be imported.
    """
    try:
        import torchtitan.models.attention as attention

        attention.FlexAttentionWrapper._compiled_flex_attn, attention._compiled_create_block_mask
    except (ImportError, AttributeError) as missing:
        raise ImportError(f"foveate.torchtitan needs TorchTitan 0.2.2: {missing}") from None
    attention.FlexAttentionWrapper._compiled_flex_attn = flex_attention
    attention._compiled_create_block_mask = create_block_mask
