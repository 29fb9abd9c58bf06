#!/usr/bin/env python3
"""Tiny random checkpoints of every family, made by transformers, and what it computes of them.

    env=$(scripts/python-env.sh)
    $env/bin/python scripts/families.py target/families
    FOVEATE_FAMILIES=target/families cargo test -p foveate-train --test families
    $env/bin/python scripts/families.py target/families --saved

The first writes a folder for each: the checkpoint, and `expected.safetensors` with tokens, labels,
logits and the gradients of every parameter for the sum of the losses, on the CPU in f32, and how far
off the same are in bf16. The test holds Foveate to them, on a GPU where there is one, too, and saves
each checkpoint again, under `saved`; the second reads these and fails where the logits are others.
`gpu-bundle/run.sh families` does the first and the test on a machine with a GPU.
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

# Sizes that divide little; rows of more tokens than a window has.
SIZES = dict(
    vocab_size=272,
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=257,
    eos_token_id=258,
    attn_implementation="eager",
)
TOKENS = 37
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=5e3,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)


def longrope(original):
    """Factors for heads of 12 of which 8 turn."""
    return dict(
        rope_type="longrope",
        rope_theta=1e3,
        partial_rotary_factor=0.67,
        short_factor=[1.0, 1.1, 1.3, 1.7],
        long_factor=[1.5, 2.0, 3.0, 4.0],
        original_max_position_embeddings=original,
    )


FAMILIES = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, head_dim=10, sliding_window=9),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=11, max_window_layers=2),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "smollm3": SmolLM3Config(**SIZES, no_rope_layer_interval=2),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=7, query_pre_attn_scalar=20),
    "gemma3": Gemma3TextConfig(
        **SIZES,
        head_dim=16,
        sliding_window=7,
        sliding_window_pattern=3,
        query_pre_attn_scalar=24,
        rope_parameters={
            "full_attention": dict(rope_type="linear", factor=8.0, rope_theta=1e4),
            "sliding_attention": dict(rope_type="default", rope_theta=1e2),
        },
    ),
    "phi3": Phi3Config(**SIZES, sliding_window=15),
    "phi4-short": Phi3Config(
        **SIZES, original_max_position_embeddings=64, rope_parameters=longrope(64)
    ),
    "phi4-long": Phi3Config(
        **SIZES, original_max_position_embeddings=16, rope_parameters=longrope(16)
    ),
}


def save_tokenizer(folder: Path):
    """Bytes, and a token that begins and one that ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def logits_of(model, tokens):
    return model(tokens[None], use_cache=False).logits[0].float()


def loss_of(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels, reduction="sum")


def off(found, expected):
    """How far off, in the mean of the squares."""
    return ((found.float() - expected).norm() / expected.norm()).reshape(1)


def off_in_bf16(folder: Path, tokens, labels, expected: dict):
    """How far off transformers is that computes in bf16, of each of the tensors that are expected."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="eager"
    )
    logits = logits_of(model, tokens)
    loss_of(logits, labels).backward()
    found = {f"gradient:{name}": value.grad for name, value in model.named_parameters()}
    found["logits"] = logits.detach()
    return {f"bf16_off:{name}": off(value, expected[name]) for name, value in found.items()}


def make(folder: Path, name: str, config):
    torch.manual_seed(sum(map(ord, name)))
    model = AutoModelForCausalLM.from_config(config, torch_dtype=torch.float32)
    # Large enough for every part to matter: first weights of 0.02 hide most of a model.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.3))
    model.save_pretrained(folder)
    save_tokenizer(folder)
    tokens = torch.randint(1, 256, (TOKENS,))
    labels = torch.randint(1, 256, (TOKENS,))
    labels[5] = -100
    logits = logits_of(model, tokens)
    loss_of(logits, labels).backward()
    expected = {
        "tokens": tokens.int(),
        "labels": labels.int(),
        "logits": logits.detach().contiguous(),
    }
    for parameter, value in model.named_parameters():
        assert value.grad.abs().max() > 0, f"{name}: {parameter} has no gradient"
        expected[f"gradient:{parameter}"] = value.grad.contiguous()
    print(f"{name}: {len(expected) - 3} parameters, largest logit {logits.abs().max():.2f}")
    expected |= off_in_bf16(folder, tokens, labels, expected)
    save_file(expected, folder / "expected.safetensors")


def check_saved(folder: Path, name: str):
    saved = sorted((folder / "saved").glob("step-*"))
    if not saved:
        sys.exit(f"{folder / 'saved'} has no checkpoint; run the test first")
    written = json.loads((saved[-1] / "config.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(
        saved[-1], torch_dtype=torch.float32, attn_implementation="eager"
    )
    kind = written["model_type"]
    expected = load_file(folder / "expected.safetensors")
    with torch.no_grad():
        logits = logits_of(model, expected["tokens"].long())
    off = (logits - expected["logits"]).abs().max().item()
    print(f"{name}: read back as {kind}, logits {off:.1e} off")
    if off > 1e-5 * expected["logits"].abs().max().item():
        sys.exit(f"{name}: transformers computes other logits of what was saved")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--saved", action="store_true", help="read what the test has saved")
    args = parser.parse_args()
    for name, config in FAMILIES.items():
        folder = args.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if args.saved:
            check_saved(folder, name)
        else:
            make(folder, name, config)


if __name__ == "__main__":
    main()
