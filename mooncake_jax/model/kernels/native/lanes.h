// SPDX-License-Identifier: Apache-2.0
// Sixteen floats at a time, in the compiler's own vector types: they become
// one register or several, whatever the processor has.
#pragma once

#include <cstdint>
#include <cstring>

constexpr int kLanes = 16;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t IntLanes __attribute__((vector_size(4 * kLanes)));

// Storage formats. A float8 is e4m3fn, the one that XLA calls F8E4M3FN.
struct BFloat16 {
  uint16_t bits;
};
struct Float8 {
  uint8_t bits;
};

inline Lanes splat(float x) { return x - Lanes{}; }

inline Lanes load(const float* p) {
  Lanes v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline Lanes load(const BFloat16* p) {
  typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));
  Half v;
  std::memcpy(&v, p, sizeof v);
  return (Lanes)(__builtin_convertvector(v, IntLanes) << 16);
}

inline Lanes load(const int8_t* p) {
  typedef int8_t Small __attribute__((vector_size(kLanes)));
  Small v;
  std::memcpy(&v, p, sizeof v);
  return __builtin_convertvector(__builtin_convertvector(v, IntLanes), Lanes);
}

// Built without subnormal floats, which XLA's threads take for 0: a number of
// exponent 0 gets the next one and loses its leading bit. NaN becomes 480.
inline Lanes load(const Float8* p) {
  typedef uint8_t Small __attribute__((vector_size(kLanes)));
  Small v;
  std::memcpy(&v, p, sizeof v);
  const IntLanes wide = __builtin_convertvector(v, IntLanes);
  const IntLanes bits = (wide & 0x7f) << 20, one = bits < (1 << 23);
  Lanes size = (Lanes)(bits + (120 << 23) + (one & (1 << 23)));
  size -= (Lanes)(one & (121 << 23));
  return (Lanes)((IntLanes)size | ((wide & 0x80) << 24));
}

// `n` numbers, zeros behind them; nothing past them is read.
template <typename T>
inline Lanes load_some(const T* p, int n) {
  if (n >= kLanes) return load(p);
  T part[kLanes] = {};
  std::memcpy(part, p, n * sizeof(T));
  return load(part);
}

inline void store(float* p, Lanes v) { std::memcpy(p, &v, sizeof v); }

inline void store_some(float* p, Lanes v, int n) {
  std::memcpy(p, &v, (n < kLanes ? n : kLanes) * sizeof(float));
}

inline Lanes larger(Lanes a, Lanes b) { return a > b ? a : b; }

// e^x of x <= 0, to 1e-7 of it; exactly 0 where that is no normal number.
inline Lanes exp_of(Lanes x) {
  const Lanes low = splat(-87.0f);
  const Lanes within = larger(x, low);
  // Adding 1.5 * 2^23 rounds to a whole number that stands in the low bits.
  const Lanes shifted = within * 1.44269504f + 12582912.0f;
  const Lanes n = shifted - 12582912.0f;
  const Lanes r = (within - n * 0.693359375f) + n * 2.12194440e-4f;
  Lanes y = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f,
                  1.6666665459e-1f, 5.0000001201e-1f}) {
    y = y * r + c;
  }
  y = y * r * r + r + 1.0f;
  y *= (Lanes)(((IntLanes)shifted + 127) << 23);
  return x < low ? Lanes{} : y;
}

// Lane i is the sum of v[i]; each turn halves how many lanes one vector has.
inline Lanes sums_of(Lanes (&v)[kLanes]) {
#define HALVE(m, ...)                                                   \
  _Pragma("GCC unroll 8") for (int i = 0; i < m; i++) {                 \
    const Lanes a = v[i], b = v[i + m];                                 \
    v[i] = low_##m(a, b) + high_##m(a, b);                              \
  }
#define PICK(name, ...)                                                 \
  const auto name = [](Lanes a, Lanes b) {                              \
    return __builtin_shufflevector(a, b, __VA_ARGS__);                  \
  };
  PICK(low_8, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
  PICK(high_8, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
  PICK(low_4, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
  PICK(high_4, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31)
  PICK(low_2, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
  PICK(high_2, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
  PICK(low_1, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
  PICK(high_1, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31)
  HALVE(8)
  HALVE(4)
  HALVE(2)
  HALVE(1)
#undef PICK
#undef HALVE
  return v[0];
}

inline float sum_of(Lanes v) {
  for (int n = kLanes / 2; n; n /= 2) {
    for (int i = 0; i < n; i++) v[i] += v[i + n];
  }
  return v[0];
}

inline float max_of(Lanes v) {
  for (int n = kLanes / 2; n; n /= 2) {
    for (int i = 0; i < n; i++) v[i] = v[i] > v[i + n] ? v[i] : v[i + n];
  }
  return v[0];
}
