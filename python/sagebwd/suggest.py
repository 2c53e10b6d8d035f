# SPDX-License-Identifier: Apache-2.0
"""What a mistyped word was probably meant to be, at the end of error messages."""

import argparse
import difflib
import inspect
import re


def did_you_mean(word, known):
    """``; did you mean 'paper'?``, or nothing where no known word is near."""
    by_lower = {str(name).lower(): str(name) for name in known}
    near = difflib.get_close_matches(str(word).lower(), by_lower, n=1, cutoff=0.7)
    return f"; did you mean {by_lower[near[0]]!r}?" if near else ""


#: Arguments of other attentions, and what they are here.
_ELSEWHERE = {
    "is_causal": "causal=",
    "scale": "softmax_scale=",
    "sm_scale": "softmax_scale=",
    "scaling": "softmax_scale=",
    "window": "window_size=",
    "logit_cap": "softcap=",
    "logits_soft_cap": "softcap=",
    "sliding_window": "window_size=",
    "return_softmax_lse": "return_lse=",
    "tensor_layout": "layout= ('bhsd' for 'HND', 'bshd' for 'NHD')",
    "s_aux": "sinks=",
    "learnable_sink": "sinks=",
    "attn_mask": "sagebwd.scaled_dot_product_attention, which reads masks",
    "attention_mask": "sagebwd.scaled_dot_product_attention, which reads masks as attn_mask=",
    "dropout_p": "no dropout of attention: sagebwd has none, that outside of it may stay",
    "enable_gqa": "nothing in its place: keys may always have fewer heads",
    "cu_seqlens_q": "sagebwd.attention_varlen",
    "cu_seqlens_k": "sagebwd.attention_varlen",
    "cu_seqlens": "sagebwd.attention_varlen",
}


def unexpected_argument(name, word, function):
    """Python's words for an argument that a function does not have, and the one to use."""
    known = [
        p.name for p in inspect.signature(function).parameters.values() if p.kind != p.VAR_KEYWORD
    ]
    elsewhere = _ELSEWHERE.get(word)
    hint = f"; use {elsewhere}" if elsewhere else did_you_mean(word, known)
    return f"{name}() got an unexpected keyword argument {word!r}{hint}"


class Parser(argparse.ArgumentParser):
    """Names the nearest option or choice when one does not exist."""

    def error(self, message):
        super().error(message + self._suggestion(message))

    def _suggestion(self, message):
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)", message)
        if choice:
            return did_you_mean(choice[1], re.findall(r"[\w.-]+", choice[2]))
        if message.startswith("unrecognized arguments:"):
            for word in message.split(":", 1)[1].split():
                if word.startswith("-"):
                    return did_you_mean(word.split("=")[0], self._option_string_actions)
        return ""
