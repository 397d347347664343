"""A region of the model as C++ / OpenMP kernels.

Generated from the graph: linear, mul, pow, mul, add, mul, tanh, add, mul. 1 of its ops stay PyTorch calls.
"""

import torch

from autokernel.backends import cpp_backend

BACKEND = "cpp"
SHAPES = "fixed"


SOURCE_fused_0 = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

static inline float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
static const float INF = std::numeric_limits<float>::infinity();
static const float NAN_ = std::numeric_limits<float>::quiet_NaN();

// exp: x = n ln2 + r with |r| <= ln2/2, a degree-6 polynomial for exp(r), then a scale by 2^n in two steps.
static inline float fast_exp(float x) {
    const float c = x < -104.0f ? -104.0f : (x > 89.0f ? 89.0f : x);
    const float shifted = c * 1.44269504f + 12582912.0f, n = shifted - 12582912.0f;
    float r = c - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const int32_t k = (int32_t)float_to_bits(shifted) - 0x4B400000, half = k >> 1;
    return p * bits_to_float((uint32_t)(half + 127) << 23) * bits_to_float((uint32_t)(k - half + 127) << 23);
}
static inline double fast_exp(double x) { return std::exp(x); }

// tanh: an odd polynomial near 0, (1 - e) / (1 + e) with e = exp(-2|x|) elsewhere.
static inline float fast_tanh(float x) {
    const float t = std::fabs(x), s = x * x;
    float p = -5.70498872745e-3f;
    p = p * s + 2.06390887954e-2f;
    p = p * s - 5.37397155531e-2f;
    p = p * s + 1.33314422036e-1f;
    p = p * s - 3.33332819422e-1f;
    p = p * s * x + x;
    const float e = fast_exp(-2.0f * t), far = (1.0f - e) / (1.0f + e);
    return t < 0.625f ? p : std::copysign(far, x);
}
static inline double fast_tanh(double x) { return std::tanh(x); }

extern "C" void run(const float* __restrict linear_4_ptr,
         float* __restrict out_ptr,
         int threads) {
    // 1 rows of 786432 columns
    #pragma omp parallel num_threads(threads) if (786432L >= 16384L)
    {
        #pragma omp for schedule(static)
        for (int64_t task = 0; task < 192; ++task) {
            const int64_t row = task / 192, begin = task % 192 * 4096;
            const int64_t end = begin + 4096 < 786432 ? begin + 4096 : 786432;
            #pragma omp simd
            for (int64_t col = begin; col < end; ++col) {
                const float linear_4_v = linear_4_ptr[col];
                const float mul = linear_4_v * 0.5f;
                const float pow_1 = linear_4_v * linear_4_v;
                const float pow_1_2 = linear_4_v * pow_1;
                const float mul_1 = pow_1_2 * 0.044715f;
                const float add = linear_4_v + mul_1;
                const float mul_2 = add * 0.7978845608028654f;
                const float tanh_ = fast_tanh(mul_2);
                const float add_1 = tanh_ + 1.0f;
                const float mul_3 = mul * add_1;
                out_ptr[col] = (float)mul_3;
            }
        }
    }
}
"""

RUN_fused_0 = cpp_backend.load(SOURCE_fused_0).function("run", pointers=2, ints=1)


def _as_expected(x, shape, stride, dtype):
    """``x`` in the layout this kernel was generated for; copied only if its strides differ."""
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"generated for {shape} {dtype}, called with {tuple(x.shape)} {x.dtype}")
    if x.stride() == stride or all(n == 1 or a == b for n, a, b in zip(shape, x.stride(), stride)):
        return x
    return torch.empty_strided(shape, stride, dtype=dtype, device=x.device).copy_(x)


def fused_0(linear_4):
    linear_4 = _as_expected(linear_4, (1, 1024, 768), (786432, 768, 1), torch.float32)
    out = torch.empty((1, 1024, 768), dtype=torch.float32, device="cpu")
    RUN_fused_0(linear_4.data_ptr(), out.data_ptr(), torch.get_num_threads())
    return (out,)


def kernel_fn(mul_8, c_fc_weight, c_fc_bias):
    linear_4 = torch.nn.functional.linear(mul_8, c_fc_weight, c_fc_bias)
    mul_12, = fused_0(linear_4)
    return mul_12
