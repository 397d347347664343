"""An RMS norm in C++ on all OpenMP threads.
Must pass: threads that have joined by the end of the call are no deferral.
"""

import torch

from autokernel.backends import cpp_backend

BACKEND = "cpp"
SOURCE = r"""
#include <cmath>
extern "C" void rms(const float* x, const float* w, float* y, int rows, int n) {
  #pragma omp parallel for
  for (int r = 0; r < rows; ++r) {
    float total = 0;
    #pragma omp simd reduction(+ : total)
    for (int i = 0; i < n; ++i) total += x[r * n + i] * x[r * n + i];
    const float scale = 1.0f / std::sqrt(total / n + 1e-5f);
    for (int i = 0; i < n; ++i) y[r * n + i] = x[r * n + i] * scale * w[i];
  }
}
"""
RMS = cpp_backend.load(SOURCE, flags=["-O2"]).function("rms", pointers=3, ints=2)


def kernel_fn(x, weight):
    y = torch.empty(x.shape)
    addresses, owners = cpp_backend.pointers(x, weight, y)
    RMS(*addresses, *x.shape)
    del owners
    return y
