// Eight floats at once, or sixteen in products where the processor can, in the compiler's own vector types, so that one
// source serves every processor.
//
// Every operation rounds as it is written: nothing is contracted (-ffp-contract=off), so that the same sum has the same
// bits in whatever loop it stands.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

typedef float v8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint16_t half8 __attribute__((vector_size(16), aligned(2), may_alias));

struct half {
    uint16_t bits;
};

// Of any vector type, from and to wherever the floats lie.
template <class Vector>
inline Vector load(const float* from) {
    Vector value;
    memcpy(&value, from, sizeof(Vector));
    return value;
}
template <class Vector>
inline void store(float* to, Vector value) { memcpy(to, &value, sizeof(Vector)); }
template <class Vector>
inline Vector all(float value) { return value - Vector{}; }

inline v8 load(const float* from) { return load<v8>(from); }
inline v8 all(float value) { return all<v8>(value); }

inline v8 load(const half* from) {
#ifdef __F16C__
    return (v8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    // The exponent of a half counts from 15, of a float from 127: the product puts that right, subnormals included.
    i8 wide = __builtin_convertvector(*reinterpret_cast<const half8*>(from), i8);
    v8 magnitude = (v8)((wide & 0x7fff) << 13) * 0x1p112f;
    return (v8)((i8)magnitude | ((wide & 0x8000) << 16));
#endif
}

inline v8 multiply_add(v8 a, v8 b, v8 c) {
#ifdef __FMA__
    return (v8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// As many floats as a register holds: what products are made of.
#ifdef __AVX512F__
constexpr int64_t LANES = 16;
typedef float wide __attribute__((vector_size(64)));

inline wide load_wide(const half* from) {
    return (wide)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline wide multiply_add(wide a, wide b, wide c) { return (wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
#else
constexpr int64_t LANES = 8;
typedef v8 wide;

inline wide load_wide(const half* from) { return load(from); }
#endif
inline wide load_wide(const float* from) { return load<wide>(from); }

// The sum of the lanes, always in the same order.
inline float sum(v8 x) { return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7])); }

// The sums of four vectors' lanes, each in the same order.
inline void sum_four(v8 a, v8 b, v8 c, v8 d, float* to) {
#ifdef __AVX__
    __m256 pairs = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
    _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
#else
    to[0] = sum(a), to[1] = sum(b), to[2] = sum(c), to[3] = sum(d);
#endif
}

// e to the x, about one unit in the last place off; below -87 and above 88 it stays where it is there.
inline v8 exponential(v8 x) {
    x = x < all(-87.0f) ? all(-87.0f) : x;
    x = x > all(88.0f) ? all(88.0f) : x;
    const v8 shift = all(12582912.0f);  // 1.5 * 2^23: adding it leaves a whole number in the low bits
    v8 shifted = multiply_add(x, all(1.44269504088896341f), shift);
    v8 whole = shifted - shift;
    v8 rest = multiply_add(whole, all(-0.693359375f), x);
    rest = multiply_add(whole, all(2.12194440e-4f), rest);
    v8 series = all(1.0f / 5040);
    series = multiply_add(series, rest, all(1.0f / 720));
    series = multiply_add(series, rest, all(1.0f / 120));
    series = multiply_add(series, rest, all(1.0f / 24));
    series = multiply_add(series, rest, all(1.0f / 6));
    series = multiply_add(series, rest, all(0.5f));
    series = multiply_add(series, rest, all(1.0f));
    series = multiply_add(series, rest, all(1.0f));
    return (v8)((i8)series + (((i8)shifted - (i8)shift) << 23));
}

}  // namespace
