"""The peer `torchtitan` of `train_gpu_peers.py`: the Llama of torchtitan 0.2.2 with its loss, its
compilation of layers and its activation checkpointing, and PyTorch's fused AdamW.

What torchtitan imports beside PyTorch, and needs for nothing here, is replaced by names.
"""

import argparse
import contextlib
import copy
import importlib
import importlib.machinery
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


def sizes_of(model: str, length: int):
    from torchtitan.models.llama3.model.args import TransformerModelArgs

    hidden, wide, layers, heads, kv_heads, _, vocab, _ = MODELS[model]
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
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3 import Transformer
    from torchtitan.models.llama3.infra import parallelize

    device, dtype = args.device, {"f32": torch.float32, "bf16": torch.bfloat16}[args.state]
    sizes = copy.deepcopy(sizes_of(args.model, args.len))
    if args.documents > 1:
        sizes.attn_type, sizes.attn_mask_type = "flex", "block_causal"
    torch.set_default_dtype(dtype)
    with torch.device("meta"):
        model = Transformer(sizes)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device(device))
    torch.set_default_dtype(torch.float32)
    wide = MODELS[args.model][1]
    found = next(p.shape[0] for n, p in model.named_parameters() if n.endswith("w1.weight"))
    if found != wide:
        sys.exit(f"its feed-forward part has {found} columns, not {wide}")
    if args.recompute != "none":
        settings = ActivationCheckpoint(mode=args.recompute, selective_ac_option="op")
        saved = parallelize._op_sac_save_list
        apply_ac(model, settings, model_compile_enabled=True, op_sac_save_list=saved)
    parallelize.apply_compile(model, Compile(enable=True, components=["model", "loss"]))
    loss_of = torch.compile(cross_entropy_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    end = sizes.vocab_size - 1
    generator = torch.Generator(device=device).manual_seed(0)
    tokens, labels = torch.randint(
        0, end, (2, args.rows, args.len), device=device, generator=generator
    )
    more = {}
    if args.documents > 1:
        for row, starts in enumerate(args.starts):
            tokens[row, [start - 1 for start in starts[1:]]] = end
        tokenizer = types.SimpleNamespace(eos_id=end)
        masks = model.get_attention_masks(input_batch=tokens, tokenizer=tokenizer)
        more["attention_masks"] = masks

    def step():
        autocast = torch.autocast(device, torch.bfloat16)
        with autocast if args.state == "f32" else contextlib.nullcontext():
            loss = loss_of(model(tokens, **more), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    measure("torchtitan", args, device, step, {"version": "0.2.2"})


if __name__ == "__main__":
    main()
