"""A backend for ``torch.compile`` that runs forward and backward graphs as they are after Foveate's pass, and what compares
functions compiled by it with uncompiled ones.

It does what Inductor does up to its code generation, so that tests see the graphs, and need no C++ compiler.
"""

import shutil

import pytest
import torch
import torch._dynamo.guards

# After each compilation Dynamo measures how long its guards take, and for that empties the processor's caches: 20 ms or
# more, and as much again for what runs beside. That the guards hold it has checked before.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="skipped: Inductor compiles for the CPU with g++, and there is none"
)


class Backend:
    """Compiles with :meth:`compile`; ``operators`` are the names of the attention operators that its graphs call, and
    ``compilations`` how many graphs of Dynamo's it was given."""

    def __init__(self):
        self.graphs = []
        self.compilations = 0

    def compile(self, function, **options):
        torch._dynamo.reset()
        return torch.compile(function, backend=self._backend, fullgraph=options.pop("fullgraph", True), **options)

    @property
    def operators(self):
        targets = (
            str(node.target) for graph in self.graphs for node in graph.graph.nodes if node.op == "call_function"
        )
        return [name for name in targets if name.startswith("foveate.") or name.startswith("flex_attention")]

    def _backend(self, graph, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        from foveate import _inductor

        self.compilations += 1

        def finish(graph, inputs):
            _inductor.replace(graph.graph)
            graph.recompile()
            self.graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=finish, bw_compiler=finish, decompositions=select_decomp_table())(graph, inputs)


def operands(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, q_len, kv_len, dim, dim_v = shape
    shapes = ((batch, heads, q_len, dim), (batch, kv_heads, kv_len, dim), (batch, kv_heads, kv_len, dim_v))
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_() for s in shapes]


def agrees(function, inputs, learned=(), backend=None, tolerance=2e-5):
    """Compiled and uncompiled, ``function`` of ``inputs`` has the same tensors and gradients of inputs and ``learned``."""
    backend = backend or Backend()
    compiled = backend.compile(function)
    results = []
    for run in (function, compiled):
        outs = run(*inputs)
        outs = outs if isinstance(outs, tuple) else (outs,)
        wanted = [t for t in (*inputs, *learned) if isinstance(t, torch.Tensor) and t.requires_grad]
        grads = ()
        if wanted:
            generator = torch.Generator().manual_seed(5)
            differentiable = [o for o in outs if o.requires_grad]
            weights = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in differentiable]
            grads = torch.autograd.grad(differentiable, wanted, weights)
        results.append((*outs, *grads))
    for ours, gold in zip(results[1], results[0]):
        assert ours.dtype == gold.dtype and ours.stride() == gold.stride()
        scale = gold.abs().nan_to_num(0, 0, 0).max().item() + 1
        torch.testing.assert_close(ours, gold, rtol=0, atol=tolerance * scale)
    assert not any(name.startswith("flex_attention") for name in backend.operators), backend.operators
    return backend
