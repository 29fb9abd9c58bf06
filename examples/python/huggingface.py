"""A Hugging Face model on Foveate: one call and the name of the attention, then packed documents as ever.

python examples/python/huggingface.py
"""

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

import foveate

foveate.huggingface.register()
torch.manual_seed(0)
config = Qwen3Config(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]

# Two documents in one row: positions begin again at each.
tokens = torch.randint(0, 256, (1, 160))
positions = torch.cat([torch.arange(100), torch.arange(60)])[None]


def loss_and_gradient(attention: str) -> tuple[float, torch.Tensor]:
    model.set_attn_implementation(attention)
    model.zero_grad()
    loss = model(input_ids=tokens, position_ids=positions, labels=tokens, use_cache=False).loss
    loss.backward()
    weight = model.model.layers[0].self_attn.q_proj.weight
    return loss.item(), weight.grad.clone()


ours, theirs = loss_and_gradient("foveate"), loss_and_gradient("eager")
torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

model.set_attn_implementation("foveate")
written = model.generate(tokens[:, :20], max_new_tokens=8, do_sample=False)
model.set_attn_implementation("eager")
assert torch.equal(written, model.generate(tokens[:, :20], max_new_tokens=8, do_sample=False))
print(f"loss {ours[0]:.4f}, with eager {theirs[0]:.4f}; both write {written[0, 20:].tolist()}")
