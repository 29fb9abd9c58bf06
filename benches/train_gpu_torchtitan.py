"""The peer `torchtitan` of `train_gpu_peers.py`: the Llama of torchtitan 0.2.2 with its loss, its
compilation of layers and its activation checkpointing, and PyTorch's fused AdamW; of several ranks with
its FSDP2, its tensor parallelism, or its context parallelism with FSDP2.

Its output projection is never the embedding, as that of Llama 3.2 is: with 1B's sizes it trains 1.498
billion parameters where Foveate trains 1.236, with 3B's 3.607 where that has 3.213.

What torchtitan imports beside PyTorch, and needs for nothing here, is replaced by names.
"""

import argparse
import contextlib
import copy
import importlib
import importlib.machinery
import os
import sys
import types

import torch

from train_gpu_peers import MODELS, measure, measured_arguments

UNUSED = ["datasets", "datasets.distributed", "tomli", "torchdata", "torchdata.nodes"]
UNUSED += ["torchdata.stateful_dataloader", "tyro", "tyro.conf", "tensorboard"]


class Named(types.ModuleType):
    """A module that has every name."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        members = {"__class_getitem__": classmethod(lambda cls, key: cls)}
        members["__init__"] = lambda self, *args, **more: None
        members["__call__"] = lambda self, *args, **more: None
        return type(name, (), members)


def replace(name: str):
    module = Named(name)
    module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(name, None), []
    sys.modules[name] = module


def load(site: str):
    sys.path.insert(0, site)
    for name in UNUSED:
        try:
            importlib.import_module(name)
        except ImportError:
            replace(name)
    replace("torchtitan.config.manager")


def sizes_of(model: str, length: int, first: int | None):
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    hidden, wide, layers, heads, kv_heads, _, vocab, _ = MODELS[model]
    layers = first or layers
    # Its feed-forward part is 8/3 of the width, times this factor, rounded up.
    factor = wide / int(8 * hidden / 3)
    return TransformerModelArgs(
        dim=hidden, n_layers=layers, n_heads=heads, n_kv_heads=kv_heads, vocab_size=vocab,
        ffn_dim_multiplier=factor, multiple_of=64, rope_theta=500000, max_seq_len=length,
    )


def main():
    site = argparse.ArgumentParser(add_help=False)
    site.add_argument("--site", required=True)
    named, rest = site.parse_known_args()
    sys.argv[1:] = rest
    args = measured_arguments()
    load(named.site)
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config.job_config import ActivationCheckpoint, Compile
    from torchtitan.distributed import context_parallel
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3 import Transformer
    from torchtitan.models.llama3.infra import parallelize

    device, dtype = args.device, {"f32": torch.float32, "bf16": torch.bfloat16}[args.state]
    sizes = copy.deepcopy(sizes_of(args.model, args.len, args.layers))
    if args.documents > 1:
        sizes.attn_type, sizes.attn_mask_type = "flex", "block_causal"
    ranks, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    mesh = None
    if ranks > 1:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        mesh = torch.distributed.device_mesh.init_device_mesh(device, (ranks,), mesh_dim_names=(args.mesh,))
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        model = Transformer(sizes)
    torch.set_default_dtype(torch.float32)
    wide = MODELS[args.model][1]
    found = next(p.shape[0] for n, p in model.named_parameters() if n.endswith("w1.weight"))
    if found != wide:
        sys.exit(f"its feed-forward part has {found} columns, not {wide}")
    if ranks > 1 and args.mesh == "tensor":
        parallelize.apply_tp(model, mesh, loss_parallel=True, enable_float8_tensorwise_tp=False)
    context = ranks > 1 and args.mesh == "context"
    if context:
        attention = [layer.attention.inner_attention for layer in model.layers.values()]
        context_parallel.apply_cp_to_attention_module(attention, mesh, sizes.attn_type)
    if args.recompute != "none":
        settings = ActivationCheckpoint(mode=args.recompute, selective_ac_option="op")
        saved = parallelize._op_sac_save_list
        apply_ac(model, settings, model_compile_enabled=True, op_sac_save_list=saved)
    parallelize.apply_compile(model, Compile(enable=True, components=["model", "loss"]))
    fsdp = ranks > 1 and args.mesh in ("shard", "context")
    if fsdp:
        parallelize.apply_fsdp(
            model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, pp_enabled=False
        )
    model.to_empty(device=device)
    torch.set_default_dtype(dtype)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    torch.set_default_dtype(torch.float32)
    loss_of = torch.compile(cross_entropy_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    end = sizes.vocab_size - 1
    generator = torch.Generator(device=device).manual_seed(0)
    tokens, labels = torch.randint(
        0, end, (2, args.rows, args.len), device=device, generator=generator
    )

    def own(rows):
        return rows.chunk(ranks)[rank] if args.mesh == "shard" else rows

    more = {}
    if args.documents > 1:
        for row, starts in enumerate(args.starts):
            tokens[row, [start - 1 for start in starts[1:]]] = end
        tokenizer = types.SimpleNamespace(eos_id=end)
        masks = model.get_attention_masks(input_batch=own(tokens), tokenizer=tokenizer)
        more["attention_masks"] = masks
    tokens, labels = own(tokens), own(labels)
    if context:
        balance = "ptrr" if args.documents > 1 else "headtail"
        tokens, labels, more = context_parallel.prepare_context_parallel_input(
            tokens, labels, more, mesh, torch.device(device), balance
        )

    # FSDP2 casts by itself; the words of the logits lie on the ranks of tensor.
    casts = args.state == "f32" and not fsdp
    loss_parallel = torch.distributed.tensor.parallel.loss_parallel

    def step():
        autocast = torch.autocast(device, torch.bfloat16)
        with loss_parallel() if ranks > 1 and args.mesh == "tensor" else contextlib.nullcontext():
            with autocast if casts else contextlib.nullcontext():
                loss = loss_of(model(tokens, **more), labels)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    measure("torchtitan", args, device, step, {"version": "0.2.2"})
    if ranks > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
