# SPDX-License-Identifier: Apache-2.0
"""The operators of the library as PyTorch sees them, one module for each family: the arguments of
its operators, fake kernels, autograd, operation counts. No other module calls
``torch.ops.sagebwd``.

    attention   attention; attention_shapes has what follows from shapes alone
    linear      the linear branch of sparse-linear attention; matmuls makes it of PyTorch's own
    mix         what stands around its branches
    sla2        both branches and their mix as one
    call        how an operator is called, and what all of them refuse
    flops       tells PyTorch's counter what each of them counts
"""
