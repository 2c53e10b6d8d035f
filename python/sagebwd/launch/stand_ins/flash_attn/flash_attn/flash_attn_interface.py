# SPDX-License-Identifier: Apache-2.0
"""FlashAttention's functions, with its arguments; and the inner ones that scripts import beside
them, which refuse to be called."""

import sagebwd
from sagebwd.launch import absent, counted

flash_attn_func = counted("flash_attn", sagebwd.flash_attn_func)
flash_attn_varlen_func = counted("flash_attn", sagebwd.flash_attn_varlen_func)
flash_attn_qkvpacked_func = counted("flash_attn", sagebwd.flash_attn_qkvpacked_func)
flash_attn_kvpacked_func = counted("flash_attn", sagebwd.flash_attn_kvpacked_func)
flash_attn_varlen_qkvpacked_func = counted("flash_attn", sagebwd.flash_attn_varlen_qkvpacked_func)
flash_attn_varlen_kvpacked_func = counted("flash_attn", sagebwd.flash_attn_varlen_kvpacked_func)
flash_attn_with_kvcache = counted("flash_attn", sagebwd.flash_attn_with_kvcache)

_REMEDY = (
    "it is one half of an attention of the caller's own (sequence parallelism, a ring); use "
    "PyTorch's context_parallel with sagebwd.integrations.context_parallel"
)
_flash_attn_forward = absent("flash_attn", "_flash_attn_forward", _REMEDY)
_flash_attn_backward = absent("flash_attn", "_flash_attn_backward", _REMEDY)
_flash_attn_varlen_forward = absent("flash_attn", "_flash_attn_varlen_forward", _REMEDY)
_flash_attn_varlen_backward = absent("flash_attn", "_flash_attn_varlen_backward", _REMEDY)
_wrapped_flash_attn_forward = absent("flash_attn", "_wrapped_flash_attn_forward", _REMEDY)
_wrapped_flash_attn_backward = absent("flash_attn", "_wrapped_flash_attn_backward", _REMEDY)
_wrapped_flash_attn_varlen_forward = absent(
    "flash_attn", "_wrapped_flash_attn_varlen_forward", _REMEDY
)
_wrapped_flash_attn_varlen_backward = absent(
    "flash_attn", "_wrapped_flash_attn_varlen_backward", _REMEDY
)
