"""What the layers after TransformerEngine's are made of: norms, linear maps, activations and rotary embeddings, with
the names that its parameters have.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from ._arguments import device as device_of
from ._arguments import dtype as dtype_of
from ._arguments import flag, integer, number, one_of, shown, tensor
from ._dot_product import Stateless
from ._masks import offsets_of

Init = Callable[[Tensor], Any]
NORMS = ("LayerNorm", "RMSNorm")


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


#: Activations, and whether they gate: the first half of the features is activated and multiplies the second.
_ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "gelu": (_gelu, False),
    "geglu": (_gelu, True),
    "qgelu": (_quick_gelu, False),
    "qgeglu": (_quick_gelu, True),
    "relu": (F.relu, False),
    "reglu": (F.relu, True),
    "srelu": (_squared_relu, False),
    "sreglu": (_squared_relu, True),
    "silu": (F.silu, False),
    "swiglu": (F.silu, True),
    "glu": (torch.sigmoid, True),
}


def where_of(device: Any, params_dtype: Any) -> dict[str, Any]:
    """Where weights are made, as torch's functions take it."""
    return dict(
        device=None if device is None else device_of("device", device), dtype=dtype_of("params_dtype", params_dtype)
    )


def check_states(name: str, x: Any, weight: Tensor) -> None:
    """Raises where the input of a layer, whose weight takes features of its last axis, is none."""
    if tensor(name, x).dim() < 2 or x.size(-1) != weight.size(-1) or x.device != weight.device:
        raise ValueError(
            f"{name} must be a tensor of {weight.size(-1)} features on {weight.device}, got {shown(x)}"
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ValueError(f"{name} must be {weight.dtype}, as the layer's weights are, got {x.dtype}")


class Layer(Stateless):
    """What layers are made of: a norm, linear maps, and TransformerEngine's names for their parameters."""

    def __init__(self, device: Any = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.where = dict(device=device, dtype=dtype)

    def add_norm(self, size: int, kind: str, eps: float, centered: bool, prefix: str = "layer_norm_") -> None:
        one_of("normalization", kind, NORMS)
        self.norm = (size, number("layernorm_epsilon", eps), flag("zero_centered_gamma", centered), prefix)
        self.register_parameter(
            prefix + "weight", Parameter((torch.zeros if centered else torch.ones)(size, **self.where))
        )
        if kind == "LayerNorm":
            self.register_parameter(prefix + "bias", Parameter(torch.zeros(size, **self.where)))

    def normed(self, x: Tensor) -> Tensor:
        size, eps, centered, prefix = self.norm
        weight, bias = getattr(self, prefix + "weight"), getattr(self, prefix + "bias", None)
        weight = weight + 1 if centered else weight
        return F.rms_norm(x, (size,), weight, eps) if bias is None else F.layer_norm(x, (size,), weight, bias, eps)

    def add_linear(self, prefix: str, inputs: int, outputs: int, bias: bool, init: Init) -> None:
        weight = torch.empty(outputs, inputs, **self.where)
        init(weight)
        self.register_parameter(prefix + "weight", Parameter(weight))
        self.register_parameter(prefix + "bias", Parameter(torch.zeros(outputs, **self.where)) if bias else None)

    def linear(self, prefix: str, x: Tensor, with_bias: bool = True) -> Tensor:
        return F.linear(x, getattr(self, prefix + "weight"), getattr(self, prefix + "bias") if with_bias else None)


class Norm(Layer):
    """LayerNorm or RMSNorm over the last axis."""

    def __init__(self, size: int, kind: str, eps: float, centered: bool, **where: Any) -> None:
        super().__init__(**where)
        self.add_norm(size, kind, eps, centered, "")

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(x)


class Projection(Layer):
    """A linear map, or several of one input, ``weight`` and ``bias``, or each with its name before it; after a norm
    where there is one."""

    def __init__(
        self,
        size: int,
        outputs: dict[str, int],
        bias: bool,
        init: Init,
        apart: bool = False,
        norm: tuple[str, float, bool] | None = None,
        **where: Any,
    ) -> None:
        super().__init__(**where)
        self.has_norm = norm is not None
        if norm is not None:
            self.add_norm(size, *norm)
        self.names = [f"{name}_" for name in outputs] if apart else [""]
        for name, features in zip(self.names, outputs.values() if apart else [sum(outputs.values())]):
            self.add_linear(name, size, features, bias, init)

    def weights(self) -> list[Tensor]:
        return [getattr(self, name + "weight") for name in self.names]

    def forward(self, x: Tensor, with_bias: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The input as it was projected, and the projections."""
        x = self.normed(x) if self.has_norm else x
        return x, tuple(self.linear(name, x, with_bias) for name in self.names)


class Feedforward(Layer):
    """A norm and two linear maps with an activation between them."""

    def __init__(
        self,
        size: int,
        inner: int,
        bias: bool,
        inits: tuple[Init, Init],
        activation: str,
        norm: tuple[str, float, bool],
        **where: Any,
    ) -> None:
        super().__init__(**where)
        one_of("activation", activation, _ACTIVATIONS)
        inner = integer("ffn_hidden_size", inner, 1)
        self.activation, self.gates = _ACTIVATIONS[activation]
        self.add_norm(size, *norm)
        self.add_linear("fc1_", size, inner * 2 if self.gates else inner, bias, inits[0])
        self.add_linear("fc2_", inner, size, bias, inits[1])

    @property
    def last_bias(self) -> Tensor | None:
        return self._parameters["fc2_bias"]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The norm's result, and the maps' before the last bias."""
        x = self.normed(x)
        inner = self.linear("fc1_", x)
        if self.gates:
            gate, other = inner.chunk(2, -1)
            inner = self.activation(gate) * other
        else:
            inner = self.activation(inner)
        return x, self.linear("fc2_", inner, with_bias=False)


class Unit(torch.nn.Module):
    """Vectors of length 1, without parameters."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)


def normal(weight: Tensor) -> None:
    torch.nn.init.normal_(weight, 0.0, 0.023)


def rotated(x: Tensor, angles: Tensor, form: str, cu: Tensor | None, interleaved: bool) -> Tensor:
    """Rotary embeddings by ``angles [s, 1, 1, d]``, of the first ``d`` of ``x``'s features."""
    if tensor("rotary_pos_emb", angles).dim() != 4 or angles.size(-1) > x.size(-1) or angles.size(-1) % 2:
        raise ValueError(
            f"rotary_pos_emb must be [s, 1, 1, d] with an even d of at most {x.size(-1)}, got {list(angles.shape)}"
        )
    if form == "thd":
        if cu is None:
            raise ValueError("rotary_pos_emb with qkv_format 'thd' needs cu_seqlens_q and cu_seqlens_kv")
        starts = torch.tensor(offsets_of("cu_seqlens", cu, x.size(0)))
        at = torch.arange(x.size(0))
        sequence = torch.searchsorted(starts, at, right=True) - 1
        at = torch.where(at < starts[-1], at - starts[sequence], 0)
        longest = int(at.max()) + 1 if at.numel() else 0
    else:
        longest = x.size(0 if form == "sbhd" else 1)
        at = torch.arange(longest)
    if longest > angles.size(0):
        raise ValueError(f"rotary_pos_emb has angles for {angles.size(0)} positions, and there are {longest}")
    angles = angles[at, :, 0] if form == "thd" else angles[at]
    angles = angles.transpose(0, 1) if form == "bshd" else angles
    size = angles.size(-1)
    turned, rest = x[..., :size], x[..., size:]
    if interleaved:
        other = torch.stack([-turned[..., 1::2], turned[..., ::2]], -1).flatten(-2)
    else:
        low, high = turned.chunk(2, -1)
        other = torch.cat([-high, low], -1)
    turned = (turned * angles.cos() + other * angles.sin()).to(x.dtype)
    return torch.cat([turned, rest], -1) if rest.size(-1) else turned
