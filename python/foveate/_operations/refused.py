"""What to write instead of functions that cannot be traced."""

from __future__ import annotations

_RANDOM = (
    "a function is read once, for all indices: draw numbers outside and read them by index; flex_attention has "
    "dropout_p"
)
_WHOLE = (
    "a traced value is one number: compute it outside of the function and read the result by index, as in "
    "`table[q_idx]`"
)

#: By the name of the function.
INSTEAD: dict[str, str] = {
    **dict.fromkeys(
        ("rand_like", "randn_like", "randint_like", "bernoulli", "dropout", "alpha_dropout", "normal"), _RANDOM
    ),
    **dict.fromkeys(
        "cumsum cumprod sort argsort topk argmax argmin unique softmax log_softmax nonzero median quantile histc flip "
        "roll cat one_hot linear".split(),
        _WHOLE,
    ),
    "view": "a traced value is a 0-d tensor: it needs no other shape",
    "reshape": "a traced value is a 0-d tensor: it needs no other shape",
    "unsqueeze": "a traced value is a 0-d tensor: it needs no other shape",
    "expand": "a traced value is a 0-d tensor: it broadcasts by itself",
    "tolist": "a function is read once, for all indices",
    "numpy": "a function is read once, for all indices",
    "gcd": "make a table of it outside and read that by index",
    "lcm": "make a table of it outside and read that by index",
}
