"""A backend for ``torch.compile`` that runs forward and backward graphs as they are after Foveate's pass.

It does what Inductor does up to its code generation, so that tests see the graphs, and need no C++ compiler.
"""

import shutil

import pytest
import torch

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
