"""C++ helpers that generated kernels inline: 16-bit conversions and branch-free elementary functions.

Every function is straight-line code without library calls, so that a compiler vectorises the loop it is
used in; libm's would stop it.  Accuracy in float32, against float64: exp, log, tanh and erf within 1.5 ulp, log1p 2.5, expm1 3.5.
"""

from __future__ import annotations

BASE = r"""
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

static inline float bits_to_float(uint32_t u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline uint32_t float_to_bits(float f) { uint32_t u; std::memcpy(&u, &f, 4); return u; }
static const float INF = std::numeric_limits<float>::infinity();
static const float NAN_ = std::numeric_limits<float>::quiet_NaN();
"""

HALF = r"""
struct half_t { uint16_t bits; };
static inline float load(half_t h) {
    const uint32_t w = (uint32_t)h.bits << 16, sign = w & 0x80000000u, twice = w + w;
    const float normal = bits_to_float((twice >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const float tiny = bits_to_float((twice >> 17) | (126u << 23)) - 0.5f;
    return bits_to_float(sign | float_to_bits(twice < (1u << 27) ? tiny : normal));
}
static inline void store(half_t* p, float f) {  // round to nearest even, overflow to infinity
    const uint32_t w = float_to_bits(f), twice = w + w, sign = w & 0x80000000u;
    uint32_t bias = twice & 0xFF000000u;
    bias = bias < 0x71000000u ? 0x71000000u : bias;
    const float base = bits_to_float((bias >> 1) + 0x07800000u) + (std::fabs(f) * 0x1.0p+112f) * 0x1.0p-110f;
    const uint32_t bits = float_to_bits(base), finite = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
    p->bits = (uint16_t)((sign >> 16) | (twice > 0xFF000000u ? 0x7E00u : finite));
}
"""

BFLOAT = r"""
struct bfloat_t { uint16_t bits; };
static inline float load(bfloat_t h) { return bits_to_float((uint32_t)h.bits << 16); }
static inline void store(bfloat_t* p, float f) {  // round to nearest even
    const uint32_t w = float_to_bits(f), rounded = (w + 0x7FFFu + ((w >> 16) & 1u)) >> 16;
    p->bits = (uint16_t)((w & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}
"""

FUNCTIONS = {
    "fast_exp": r"""
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
""",
    "fast_tanh": r"""
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
""",
    "fast_erf": r"""
// erf: a rational approximation on [-4, 4], where it saturates in float32 (the one XLA and Eigen use).
static inline float fast_erf(float a) {
    const float x = a < -4.0f ? -4.0f : (a > 4.0f ? 4.0f : a), s = x * x;
    float p = -2.72614225801306e-10f;
    p = p * s + 2.77068142495902e-8f;
    p = p * s - 2.10102402082508e-6f;
    p = p * s - 5.69250639462346e-5f;
    p = p * s - 7.34990630326855e-4f;
    p = p * s - 2.95459980854025e-3f;
    p = p * s - 1.60960333262415e-2f;
    float q = -1.45660718464996e-5f;
    q = q * s - 2.13374055278905e-4f;
    q = q * s - 1.68282697438203e-3f;
    q = q * s - 7.37332916720468e-3f;
    q = q * s - 1.42647390514189e-2f;
    return x * p / q;
}
static inline double fast_erf(double x) { return std::erf(x); }
""",
    "fast_log": r"""
// log: x = m 2^e with m in [sqrt(1/2), sqrt(2)), a degree-9 polynomial in m - 1 (Cephes).
static inline float fast_log(float x) {
    const bool tiny = x < 1.17549435e-38f;
    const float y = tiny ? x * 8388608.0f : x;
    uint32_t u = float_to_bits(y) - 0x3F3504F3u;
    const float e = (float)((int32_t)u >> 23) - (tiny ? 23.0f : 0.0f);
    const float f = bits_to_float((u & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f, z = f * f;
    float p = 7.0376836292e-2f;
    p = p * f - 1.1514610310e-1f;
    p = p * f + 1.1676998740e-1f;
    p = p * f - 1.2420140846e-1f;
    p = p * f + 1.4249322787e-1f;
    p = p * f - 1.6668057665e-1f;
    p = p * f + 2.0000714765e-1f;
    p = p * f - 2.4999993993e-1f;
    p = p * f + 3.3333331174e-1f;
    p = p * f * z - 2.12194440e-4f * e - 0.5f * z + f + 0.693359375f * e;
    p = x == INF ? INF : (x == 0.0f ? -INF : p);
    return x >= 0.0f ? p : NAN_;
}
static inline double fast_log(double x) { return std::log(x); }
""",
    "fast_log1p": r"""
static inline float fast_log1p(float x) {
    const float u = 1.0f + x, safe = u == 1.0f ? 2.0f : u;
    const float exact = fast_log(safe) * (x / (safe - 1.0f));
    return u == 1.0f ? x : (u == INF ? u : exact);
}
static inline double fast_log1p(double x) { return std::log1p(x); }
""",
    "fast_expm1": r"""
static inline float fast_expm1(float x) {
    float p = 1.98412698e-4f;
    p = p * x + 1.38888889e-3f;
    p = p * x + 8.33333333e-3f;
    p = p * x + 4.16666667e-2f;
    p = p * x + 1.66666667e-1f;
    p = p * x + 0.5f;
    return std::fabs(x) < 0.35f ? p * (x * x) + x : fast_exp(x) - 1.0f;
}
static inline double fast_expm1(double x) { return std::expm1(x); }
""",
    "larger": r"""
// A NaN wins.  Two types, because a position (64 bits) may be held against a plain literal.
template <class T, class U> static inline auto larger(T a, U b) { return a > b || a != a ? a : b; }
template <class T, class U> static inline auto smaller(T a, U b) { return a < b || a != a ? a : b; }
""",
}

_NEEDS = {
    "fast_tanh": ["fast_exp"], "fast_log1p": ["fast_log"], "fast_expm1": ["fast_exp"],
}  # fmt: skip


def header(functions: set[str], half: bool, bfloat: bool) -> str:
    """The helpers that a kernel needs, in an order that compiles."""
    wanted = set(functions)
    for name in functions:
        wanted |= set(_NEEDS.get(name, []))
    text = BASE + (HALF if half else "") + (BFLOAT if bfloat else "")
    return text + "".join(FUNCTIONS[name] for name in FUNCTIONS if name in wanted)
