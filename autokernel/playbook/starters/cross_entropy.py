"""Cross-entropy of class logits, averaged over the rows that are not ignored.

    kernel_fn(logits, target)  = F.cross_entropy(logits.float(), target)   # logits (..., classes), target (...) int64

A row is read once: the maximum and the sum of exponentials are kept online, block by block.  Rows whose target is
IGNORE_INDEX count for nothing.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportAssignmentType=false

import torch
import triton
import triton.language as tl

BACKEND = "triton"
SHAPES = "any"

IGNORE_INDEX = -100
BLOCK = 4096
num_warps = 8
SPACE = {"BLOCK": [1024, 2048, 4096, 8192, 16384], "num_warps": [4, 8, 16]}


@triton.jit
def cross_entropy_kernel(logits_ptr, target_ptr, loss_ptr, classes, ignore, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * classes
    top = float("-inf")
    total = 0.0
    for start in range(0, classes, BLOCK):
        col = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + col, mask=col < classes, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - base) + tl.sum(tl.exp(x - base), axis=0)
        top = new_top
    target = tl.load(target_ptr + row)
    counts = target != ignore
    at = tl.where(counts, target, 0)
    picked = tl.load(logits_ptr + at).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(counts, tl.log(total) + top - picked, 0.0))


def kernel_fn(logits, target):
    classes = logits.shape[-1]
    logits, target = logits.reshape(-1, classes).contiguous(), target.reshape(-1).contiguous()
    rows = target.numel()
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    cross_entropy_kernel[(rows,)](
        logits, target, loss, classes, IGNORE_INDEX, BLOCK=BLOCK, num_warps=num_warps
    )
    return loss.sum() / (target != IGNORE_INDEX).sum()
