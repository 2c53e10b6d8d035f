# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds of the model, the optimizer and the random number generators, as whole
CPU tensors by name. The files do not depend on the number of processes that wrote them, and any
number can read them."""

import torch

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def collect(model, optimizer):
    """Collective when the model is sharded: every rank calls it, every rank gets the tensors."""
    weights = {name: _whole(p) for name, p in model.named_parameters()}
    moments = {}
    for name, p in model.named_parameters():
        if p in optimizer.state:  # not before the first step
            for key in _MOMENTS:
                moments[f"{name}:{key}"] = _whole(optimizer.state[p][key])
    moments["rng:cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        moments["rng:cuda"] = torch.cuda.get_rng_state()
    return {"weights": weights, "optimizer": moments}


def restore(model, optimizer, tensors):
    restore_weights(model, tensors["weights"])
    moments = tensors["optimizer"]
    for name, p in model.named_parameters():
        if f"{name}:step" not in moments:
            continue  # saved before the first step
        state = optimizer.state[p] = {}
        for key in _MOMENTS:
            value = moments[f"{name}:{key}"]
            if key == "step":
                on_gpu = p.is_cuda and optimizer.defaults.get("fused")
                state[key] = value.to(p.device) if on_gpu else value
            else:
                state[key] = _like(value, p)
    torch.set_rng_state(moments["rng:cpu"])
    if torch.cuda.is_available() and "rng:cuda" in moments:
        torch.cuda.set_rng_state(moments["rng:cuda"])


def restore_weights(model, weights):
    own = dict(model.named_parameters())
    if own.keys() != weights.keys():
        different = sorted(own.keys() ^ weights.keys())
        raise ValueError(f"checkpoint: other parameters than the model's: {different[:4]}")
    with torch.no_grad():
        for name, p in own.items():
            if p.shape != weights[name].shape:
                raise ValueError(
                    f"checkpoint: {name} has shape {tuple(weights[name].shape)}, the model's "
                    f"{tuple(p.shape)}"
                )
            p.copy_(_like(weights[name], p))


def _whole(t):
    t = t.detach()
    t = t.full_tensor() if hasattr(t, "full_tensor") else t
    return t.to("cpu", copy=True)


def _like(value, p):
    """``value`` on p's device, cut into shards as p is."""
    if not hasattr(p, "placements"):
        return value.to(p.device)
    from torch.distributed.tensor import distribute_tensor

    # Every rank has read the whole tensor: nothing needs to be sent.
    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)
