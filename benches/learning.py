#!/usr/bin/env python3
"""What Foveate learns beside PyTorch: losses of the same tokens, and gradients beside f64.

    python3 benches/learning.py losses --model 135m --rows 8 --len 2048 --steps 300
    python3 benches/learning.py gradients

`losses` trains the loop of `train_gpu_loop.py` and `foveate train` from the same weights, on the same rows
of documents in the same order, by the same rates: f32 masters, bf16 weights and activations, AdamW. The
texts are Python's own sources on this machine, read by a byte-pair tokenizer that is trained on them. It
fails where the means of the last 50 losses are more than 0.01 nats apart, or the tokens are not the same.

`gradients` compares the gradients of one step of a small model, by bf16 weights, with f64's: Foveate's, as
the moment of a first step of gradient descent has them, and those of PyTorch in bf16 with norms, rotations,
gates and the loss in f32 and FlashAttention, a document at a time. It fails where the error of a parameter,
the root of its mean square, is more than 1.1 times PyTorch's. Errors of several models, of other weights and
texts, are taken together.

On `--device cpu` Foveate computes in f32: that shows that both are given the same.
"""

import argparse
import contextlib
import json
import math
import random
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from train_gpu_peers import FOVEATE, MODELS

END = "<|endoftext|>"
EPS, THETA = 1e-5, 10000.0
NEAR, WORSE, LAST = 0.01, 1.1, 50  # the bars, and the steps of the first
# As in MODELS; short, with a head of its own, so that each has a gradient to compare.
SMALL = (256, 640, 2, 4, 2, 64, 1024, False)
RECIPE = """
[run]
dir = "run"
seed = 1
[model]
checkpoint = "init"
[attention]
mask = "causal & document"
[data]
files = ["documents.jsonl"]
add_bos_token = false
add_eos_token = true
len = {length}
held_out = 0.0
shuffle = false
[train]
steps = {steps}
batch_rows = {rows}
eval_every = 0
save_every = 0
[optimizer]
{optimizer}
[schedule]
warmup_steps = {warmup}
"""


def texts(most_bytes, seed):
    """Python's own sources, so many bytes of them at most, in an order of the seed."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    random.Random(seed).shuffle(files)
    found, taken = [], 0
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        if taken >= most_bytes:
            break
        if 200 < len(text) < 200_000:
            found.append(text)
            taken += len(text)
    return found


def tokenizer_of(found, words, folder):
    """A byte-pair tokenizer of so many words, trained on the texts and put beside the first weights."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=words, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(found, trainer)
    (folder / "init").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "init" / "tokenizer.json"))
    (folder / "init" / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return tokenizer


def tokens_of(found, tokenizer, folder):
    """The documents as tokens, each with the token that ends it; and as the file that a recipe reads."""
    with open(folder / "documents.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in found)
    end = [tokenizer.token_to_id(END)]
    encoded = tokenizer.encode_batch(found, add_special_tokens=False)
    return [torch.tensor(one.ids + end) for one in encoded]


def batches(documents, rows, length):
    """Rows as docs/recipes.md says: documents one after another, in turns without an end; tokens, labels (-1
    where there is none), numbers of documents and positions, `[rows, length]` each."""

    def filled():
        row = [torch.full((length,), -1) for _ in range(4)]
        at = number = 0
        while True:
            for ids in documents:
                following = torch.cat([ids[1:], torch.tensor([-1])])
                first = 0
                while first < len(ids):
                    count = min(length - at, len(ids) - first)
                    here, of = slice(at, at + count), slice(first, first + count)
                    row[0][here], row[1][here] = ids[of], following[of]
                    row[2][here], row[3][here] = number, torch.arange(count)
                    at, number, first = at + count, number + 1, first + count
                    if at == length:
                        yield [part.clone() for part in row]
                        at = number = 0

    stream = filled()
    while True:
        yield [torch.stack(parts) for parts in zip(*(next(stream) for _ in range(rows)))]


def shapes(sizes):
    """The parameters of a Llama by Hugging Face's names."""
    hidden, wide, layers, heads, kv_heads, dim, words, tied = sizes
    yield "model.embed_tokens.weight", (words, hidden)
    for layer in range(layers):
        name = f"model.layers.{layer}."
        yield name + "input_layernorm.weight", (hidden,)
        yield name + "self_attn.q_proj.weight", (heads * dim, hidden)
        yield name + "self_attn.k_proj.weight", (kv_heads * dim, hidden)
        yield name + "self_attn.v_proj.weight", (kv_heads * dim, hidden)
        yield name + "self_attn.o_proj.weight", (hidden, heads * dim)
        yield name + "post_attention_layernorm.weight", (hidden,)
        yield name + "mlp.gate_proj.weight", (wide, hidden)
        yield name + "mlp.up_proj.weight", (wide, hidden)
        yield name + "mlp.down_proj.weight", (hidden, wide)
    yield "model.norm.weight", (hidden,)
    if not tied:
        yield "lm_head.weight", (words, hidden)


def begun(sizes, length, seed, folder, of_bf16):
    """First weights, f32, in a checkpoint too; `of_bf16` makes them numbers of bf16."""
    hidden, wide, layers, heads, kv_heads, dim, words, tied = sizes
    generator, weights = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes(sizes):
        weight = torch.randn(shape, generator=generator) * 0.02
        weight = weight + 1.0 if len(shape) == 1 else weight
        weights[name] = weight.bfloat16().float() if of_bf16 else weight
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
    config |= {"vocab_size": words, "hidden_size": hidden, "intermediate_size": wide}
    config |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"head_dim": dim, "rms_norm_eps": EPS, "rope_theta": THETA, "tie_word_embeddings": tied}
    config |= {"max_position_embeddings": length, "torch_dtype": "float32"}
    (folder / "init" / "config.json").write_text(json.dumps(config))
    write_tensors(folder / "init" / "model.safetensors", weights)
    return weights


def write_tensors(path, tensors):
    """A safetensors file of f32."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        span = [at, at + 4 * tensor.numel()]
        header[name], at = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": span}, span[1]
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(tensor.contiguous().numpy().tobytes() for tensor in tensors.values())


def read_tensors(path):
    """The tensors of a safetensors file of f32."""
    data = bytearray(path.read_bytes())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    header.pop("__metadata__", None)
    values = torch.frombuffer(data, dtype=torch.uint8)
    found = {}
    for name, said in header.items():
        first, end = (begin + place for place in said["data_offsets"])
        found[name] = values[first:end].clone().view(torch.float32).view(said["shape"])
    return found


def foveate(args, folder, steps, optimizer, warmup):
    """Trains by Foveate: what it noted of each step, and its checkpoint."""
    recipe = RECIPE.format(
        length=args.len, steps=steps, rows=args.rows, optimizer=optimizer, warmup=warmup
    )
    (folder / "recipe.toml").write_text(recipe)
    device = "cuda:0" if args.device == "cuda" else args.device
    command = [args.foveate, "train", "recipe.toml", "--start-over", "--device", device]
    ran = subprocess.run(command, cwd=folder, text=True, capture_output=True)
    if ran.returncode != 0:
        sys.exit(f"learning: {args.foveate}: {ran.stderr.strip()}")
    log = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in log if line["kind"] == "step"], folder / f"run/checkpoints/step-{steps:06}"


def turns(positions, dim, device):
    """Cosines and sines of the rotations, `[rows, 1, length, dim / 2]`."""
    rate = THETA ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = (positions[:, None, :, None].double() * rate).to(device)
    return angle.cos(), angle.sin()


# --- losses


class Documents:
    """Attention within documents, which are others in every batch, by one mask for all of them."""

    def __init__(self, rows, length, device, is_flex):
        ids = torch.zeros(rows, length, dtype=torch.int32, device=device)
        dense = torch.ones(rows, 1, length, length, dtype=torch.bool, device=device).tril()
        self.ids, self.dense, self.is_flex = ids, dense, is_flex

        def sdpa(q, k, v):
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=dense)

        if not is_flex:
            self.attend = sdpa
            return
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def sees(b, h, q, kv):
            return (q >= kv) & (ids[b, q] == ids[b, kv])

        self.made = lambda: create_block_mask(sees, rows, None, length, length, device)
        self.mask = mask = self.made()
        # Values are a view of a product; PyTorch 2.11 reads such a one wrongly where it compiles for a CPU.
        self.attend = lambda q, k, v: flex_attention(q, k, v.contiguous(), block_mask=mask, enable_gqa=True)

    def set(self, ids):
        """In place, where compiled layers have the addresses."""
        self.ids.copy_(ids)
        if not self.is_flex:
            self.dense.copy_((self.ids[:, None, :, None] == self.ids[:, None, None, :]).tril())
            return
        made = self.made()
        for part in ("kv", "full_kv", "q", "full_q"):
            for of in (f"{part}_num_blocks", f"{part}_indices"):
                getattr(self.mask, of).copy_(getattr(made, of))


def loop(args, sizes, weights, stream, rates):
    """The losses of the loop of `train_gpu_loop.py` from these weights on, by these rates; labelled tokens."""
    from train_gpu_loop import Llama

    device, dim = args.device, sizes[5]
    documents = Documents(args.rows, args.len, device, args.attention == "flex")
    with torch.device(device):
        model = Llama(sizes, [documents.attend], "none").bfloat16()
    own = dict(model.named_parameters())
    with torch.no_grad():
        masters = {name: value.to(device) for name, value in packed(weights, sizes).items()}
        for name, parameter in own.items():
            parameter.copy_(masters[name])
    if device == "cuda":
        for layer in model.layers:
            layer.compile(dynamic=False)
    kept = [masters[name].clone() for name in own]
    decayed = [master for master in kept if master.dim() > 1]
    plain = [master for master in kept if master.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8, fused=device == "cuda")
    losses, labelled = [], 0
    for rate in rates:
        tokens, labels, ids, positions = next(stream)
        labelled += int((labels >= 0).sum())
        documents.set(ids.to(device))
        cos, sin = (part.bfloat16() for part in turns(positions, dim, device))
        loss = model(tokens.to(device), labels.to(device), cos, sin)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(own.values()), 1.0)
        for master, parameter in zip(kept, own.values()):
            master.grad = parameter.grad.float()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(own.values()), kept)
        model.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses).float().tolist(), labelled


def packed(weights, sizes):
    """The weights as the loop names and packs them."""
    embedding = weights["model.embed_tokens.weight"]
    # One parameter, which goes by either name, where they are tied.
    found = {"embedding.weight": embedding, "head": weights.get("lm_head.weight", embedding)}
    found["norm.weight"] = weights["model.norm.weight"]
    for layer in range(sizes[2]):
        of = lambda *names: torch.cat([weights[f"model.layers.{layer}.{name}.weight"] for name in names])
        to = f"layers.{layer}."
        found[to + "norm.weight"] = of("input_layernorm")
        found[to + "mlp_norm.weight"] = of("post_attention_layernorm")
        found[to + "qkv.weight"] = of(*(f"self_attn.{part}_proj" for part in "qkv"))
        found[to + "o.weight"] = of("self_attn.o_proj")
        found[to + "gate_up.weight"] = of("mlp.gate_proj", "mlp.up_proj")
        found[to + "down.weight"] = of("mlp.down_proj")
    return found


def compare_losses(args):
    """Whether the last losses are near the loop's, which is told."""
    sizes, folder = MODELS[args.model], args.folder / "losses"
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()

    def tell(what):
        print(f"{time.perf_counter() - began:6.1f} s  {what}", file=sys.stderr, flush=True)

    # A token of such texts has three bytes and more.
    found = texts(4 * args.rows * args.len * args.steps, args.seed)
    tokenizer = tokenizer_of(found, sizes[6], folder)
    documents = tokens_of(found, tokenizer, folder)
    count = sum(map(len, documents))
    tell(f"{len(documents)} documents, {count} tokens of {tokenizer.get_vocab_size()}")
    weights = begun(sizes, args.len, args.seed, folder, False)
    own, _ = foveate(args, folder, args.steps, f"lr = {args.lr}", min(args.warmup, args.steps))
    tell(f"{len(own)} steps of Foveate")
    stream, rates = batches(documents, args.rows, args.len), [step["lr"] for step in own]
    theirs, labelled = loop(args, sizes, weights, stream, rates)
    tell(f"{len(theirs)} steps of the loop")
    losses = [step["loss"] for step in own]
    runs = {"Foveate": losses, "loop": theirs}
    if args.nudged:
        generator = torch.Generator().manual_seed(args.seed + 1)
        for weight in weights.values():
            weight += args.nudged * weight * torch.randn(weight.shape, generator=generator)
        stream = batches(documents, args.rows, args.len)
        runs["nudged"], _ = loop(args, sizes, weights, stream, rates)
        tell("the loop again, from nudged weights")
    with open(folder / "losses.jsonl", "w") as file:
        for step, of_runs in enumerate(zip(*runs.values()), 1):
            file.write(json.dumps({"step": step, **dict(zip(runs, of_runs))}) + "\n")
    same = labelled == own[-1]["labelled_tokens"]
    print(f"\nlosses, {args.model}, {args.steps} steps of {args.rows} rows of {args.len}")
    print(f"labelled tokens: {own[-1]['labelled_tokens']}, {labelled} of the loop")
    print(f"{'steps':>12} " + "".join(f"{name:>10}" for name in runs) + f"{'difference':>12}")
    last = min(LAST, args.steps)
    spans = [(1, 1), *((n, n + 49) for n in range(1, args.steps - 49, 50)), (args.steps - last + 1, args.steps)]
    for first, end in dict.fromkeys(spans):
        means = [sum(all[first - 1 : end]) / (end - first + 1) for all in runs.values()]
        of_own, of_theirs = means[:2]
        apart = [of_own - of_theirs, *(of_theirs - again for again in means[2:])]
        print(f"{f'{first} to {end}':>12} " + "".join(f"{mean:10.4f}" for mean in means) + "".join(f"{d:+12.5f}" for d in apart))
    passed = same and abs(of_own - of_theirs) <= NEAR
    print(f"{'passed' if passed else 'FAILED'}: the same tokens, and means of the last {last} losses within {NEAR} nats")
    return passed


# --- gradients


def nats(weights, sizes, batch, dtype, device):
    """The mean loss of a batch by weights of `dtype`; statistics, rotations and gates in f32 or wider."""
    _, _, layers, heads, kv_heads, dim, _, tied = sizes
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    is_fused = device == "cuda" and dtype == torch.bfloat16
    tokens, labels, ids, positions = (part.to(device) for part in batch)
    rows, length = tokens.shape
    cos, sin = (part.to(wide) for part in turns(positions.cpu(), dim, device))
    # Where the documents of each row begin, and the row ends.
    starts = [[at for at in range(length) if at == 0 or row[at] != row[at - 1]] + [length] for row in ids.tolist()]

    def norm(x, name):
        x = x.to(wide)
        scaled = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt()
        return (scaled * weights[name].to(wide)).to(dtype)

    def head(x, count):
        return x.view(rows, length, count, dim).transpose(1, 2)

    def turned(x):
        a, b = x.to(wide).chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(dtype)

    def attention(*operands):
        """Each document by itself, so that no mask keeps PyTorch from its fused kernel."""
        found = []
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if is_fused else contextlib.nullcontext():
            for row, of_row in enumerate(starts):
                spans = [slice(*span) for span in zip(of_row, of_row[1:])]
                parts = ([x[row : row + 1, :, span] for x in operands] for span in spans)
                outs = [F.scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
                found.append(torch.cat(outs, 2))
        return torch.cat(found)

    x = weights["model.embed_tokens.weight"][tokens]
    for layer in range(layers):
        of = lambda name: weights[f"model.layers.{layer}.{name}.weight"]
        n = norm(x, f"model.layers.{layer}.input_layernorm.weight")
        q, k, v = (n @ of(f"self_attn.{part}_proj").T for part in "qkv")
        q, k, v = turned(head(q, heads)), turned(head(k, kv_heads)), head(v, kv_heads)
        a = attention(q, k, v)
        x = x + a.transpose(1, 2).reshape(rows, length, -1) @ of("self_attn.o_proj").T
        n = norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
        gate, up = (n @ of(f"mlp.{part}_proj").T for part in ("gate", "up"))
        x = x + (F.silu(gate.to(wide)) * up.to(wide)).to(dtype) @ of("mlp.down_proj").T
    last = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
    logits = (norm(x, "model.norm.weight") @ last.T).to(wide)
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-1)


def gradients(weights, sizes, batch, dtype, device):
    """Those of `nats`, in f64, by names; the loss."""
    own = {name: value.to(device, dtype).requires_grad_() for name, value in weights.items()}
    loss = nats(own, sizes, batch, dtype, device)
    loss.backward()
    return {name: value.grad.double().cpu() for name, value in own.items()}, loss.item()


def compare_gradients(args):
    """Whether no gradient is farther from f64 than PyTorch's by more than it may, which is told."""
    sizes, folder = SMALL, args.folder / "gradients"
    folder.mkdir(parents=True, exist_ok=True)
    squares = {name: torch.zeros(3, dtype=torch.float64) for name, _ in shapes(sizes)}
    apart = 0.0
    for seed in range(args.models):
        found = texts(16 * args.rows * args.len, args.seed + seed)
        # Short ones, so that a row has several.
        found = [text[at : at + 600] for text in found[:40] for at in range(0, min(len(text), 6000), 600)]
        found = [text for text in found if text.strip()]
        random.Random(seed).shuffle(found)
        tokenizer = tokenizer_of(found, sizes[6], folder)
        documents = tokens_of(found, tokenizer, folder)
        weights = begun(sizes, args.len, args.seed + seed, folder, True)
        [step], checkpoint = foveate(args, folder, 1, 'kind = "sgd"\nclip_norm = 0.0', 1)
        kept = read_tensors(checkpoint / "masters.safetensors")
        batch = next(batches(documents, args.rows, args.len))
        exact, loss = gradients(weights, sizes, batch, torch.float64, args.device)
        low, _ = gradients(weights, sizes, batch, torch.bfloat16, args.device)
        apart = max(apart, abs(step["loss"] - loss))
        for name, gold in exact.items():
            errors = (kept[f"mean:{name}"].double() - gold, low[name] - gold)
            squares[name] += torch.tensor([value.square().mean() for value in (gold, *errors)])
    print(f"\ngradients of {args.models} models, {args.rows} rows of {args.len}; losses at most {apart:.2e} nats from f64's")
    print(f"{'parameter':<52} {'error':>9} {'PyTorch':>9} {'ratio':>7}")
    worst, total = 0.0, torch.zeros(3, dtype=torch.float64)
    for name, parts in squares.items():
        size, own, theirs = parts.sqrt().tolist()
        worst, total = max(worst, own / theirs), total + parts * math.prod(dict(shapes(sizes))[name])
        print(f"{name:<52} {own / size:9.2e} {theirs / size:9.2e} {own / theirs:7.3f}")
    size, own, theirs = total.sqrt().tolist()
    print(f"{'all':<52} {own / size:9.2e} {theirs / size:9.2e} {own / theirs:7.3f}")
    passed = worst <= WORSE
    print(f"{'passed' if passed else 'FAILED'}: the worst is {worst:.3f} times PyTorch's, {WORSE} at most")
    return passed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["losses", "gradients"])
    parser.add_argument("--model", choices=MODELS, default="135m", help="of losses; %(default)s")
    parser.add_argument("--rows", type=int, help="of a batch; 8 of losses, 4 of gradients")
    parser.add_argument("--len", type=int, help="of a row; 2048 of losses, 512 of gradients")
    parser.add_argument("--steps", type=int, default=300, help="of losses; %(default)s")
    parser.add_argument("--lr", type=float, default=3e-4, help="the highest rate, of losses; %(default)s")
    parser.add_argument("--warmup", type=int, default=60, help="steps up to it; %(default)s")
    parser.add_argument(
        "--nudged", type=float, default=0.0, metavar="PART",
        help="train the loop once more from weights that are off by so much of themselves: how far runs part by themselves",
    )
    parser.add_argument("--models", type=int, default=6, help="of gradients; %(default)s")
    parser.add_argument("--attention", choices=["flex", "sdpa"], help="of the loop; flex where there is a GPU")
    parser.add_argument("--seed", type=int, default=1, help="of weights and texts; %(default)s")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=lambda text: Path(text).absolute(), default=Path("learning").absolute())
    parser.add_argument("--foveate", type=lambda text: Path(text).absolute(), default=FOVEATE, help="%(default)s")
    args = parser.parse_args()
    if not args.foveate.exists():
        sys.exit(f"learning: {args.foveate} is missing; name it by --foveate")
    of_losses = args.what == "losses"
    args.attention = args.attention or ("flex" if args.device == "cuda" else "sdpa")
    args.rows = args.rows or (8 if of_losses else 4)
    args.len = args.len or (2048 if of_losses else 512)
    return int(not (compare_losses if of_losses else compare_gradients)(args))


if __name__ == "__main__":
    sys.exit(main())
