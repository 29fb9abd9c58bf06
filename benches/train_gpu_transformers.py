"""The peer `transformers` of `train_gpu_peers.py`: its Llama and the loss that it computes itself, not
compiled, with SDPA, its gradient checkpointing, and PyTorch's fused AdamW. For orientation: what one has
who trains by the library alone.
"""

import contextlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import __version__ as version

from train_gpu_peers import MODELS, measure, measured_arguments


def main():
    args = measured_arguments()
    device, dtype = args.device, {"f32": torch.float32, "bf16": torch.bfloat16}[args.state]
    hidden, wide, layers, heads, kv_heads, dim, vocab, tied = MODELS[args.model]
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=dim, rms_norm_eps=1e-5,
        max_position_embeddings=args.len, rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=tied, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(config)
    model.to(dtype).train()
    if args.recompute == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    generator = torch.Generator(device=device).manual_seed(0)
    tokens = torch.randint(0, vocab, (args.rows, args.len), device=device, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")

    def step():
        casts = args.state == "f32"
        with torch.autocast(device, torch.bfloat16) if casts else contextlib.nullcontext():
            # It takes the labels of each token and moves them by one itself.
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    measure("transformers", args, device, step, {"version": version})


if __name__ == "__main__":
    main()
