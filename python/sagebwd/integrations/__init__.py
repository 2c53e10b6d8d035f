# SPDX-License-Identifier: Apache-2.0
"""Hooks into other packages, one module each. Importing a module changes nothing; its functions act
when called and can be undone.

    torch_sdpa        F.scaled_dot_product_attention, on the CPU and on CUDA
    transformers      attn_implementation="sagebwd"
    diffusers         the native attention backend
    torchtitan        an inner-attention module
    megatron          a core-attention module for a layer spec
    context_parallel  ring attention over several ranks
    dtensor           how distributed tensors may be sharded: batches and heads
"""
