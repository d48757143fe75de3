// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with a large matrix, at the speed of reading it.
//
// The matrix is read once, some of its rows over some of its columns at a time,
// while the same of its next rows is asked for. Sums stay in the first cache.
//
// B row, I input, O output.

#include <algorithm>
#include <vector>

#include "lanes.h"
#include "share.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t kInputs = 4;     // of the matrix at a time
constexpr int64_t kOutputs = 768;  // as wide as was fastest (LOG.md)
constexpr int64_t kPieceBytes = 1 << 17;  // less is not worth a thread
constexpr int kMostRows = 8;

// A matrix [I, O], and how many of its outputs from here on are meant.
template <typename T>
struct Matrix {
  const T* at;
  int64_t num_inputs, stride, num_outputs;
};

// Adds inputs [0, count) to the sums of NB rows and NO lanes of outputs.
template <int NB, int NO, bool kCut, typename T>
inline void add(const float* x_IB, const T* w_IO, int64_t stride, int count,
                int cut, float* sum) {
  Lanes y[NB][NO];
#pragma GCC unroll 8
  for (int b = 0; b < NB; b++) {
#pragma GCC unroll 8
    for (int o = 0; o < NO; o++) y[b][o] = load(sum + (b * NO + o) * kLanes);
  }
  for (int i = 0; i < count; i++, w_IO += stride, x_IB += NB) {
    Lanes w[NO];
#pragma GCC unroll 8
    for (int o = 0; o < NO; o++) {
      const T* at = w_IO + o * kLanes;
      w[o] = kCut ? load_some(at, cut) : load(at);
      __builtin_prefetch(at + kInputs * stride, 0, 3);
    }
#pragma GCC unroll 8
    for (int b = 0; b < NB; b++) {
      const Lanes x = splat(x_IB[b]);
#pragma GCC unroll 8
      for (int o = 0; o < NO; o++) y[b][o] += x * w[o];
    }
  }
#pragma GCC unroll 8
  for (int b = 0; b < NB; b++) {
#pragma GCC unroll 8
    for (int o = 0; o < NO; o++) store(sum + (b * NO + o) * kLanes, y[b][o]);
  }
}

// The outputs of one piece, at most kOutputs; y's rows are `y_stride` long.
template <int NB, typename T>
void multiply(const float* x_IB, const Matrix<T>& w, float* y, int64_t y_stride) {
  constexpr int NO = NB > 4 ? 3 : 6;  // as many sums as there are registers
  constexpr int64_t kWide = NO * kLanes;
  alignas(64) float sums[NB * kOutputs] = {};
  const int64_t O = w.num_outputs;
  for (int64_t i = 0; i < w.num_inputs; i += kInputs) {
    const int count = std::min(kInputs, w.num_inputs - i);
    const float* x = x_IB + i * NB;
    const T* row = w.at + i * w.stride;
    int64_t o = 0;
    for (; o + kWide <= O; o += kWide) {
      add<NB, NO, false>(x, row + o, w.stride, count, 0, sums + o * NB);
    }
    for (; o + kLanes <= O; o += kLanes) {
      add<NB, 1, false>(x, row + o, w.stride, count, 0, sums + o * NB);
    }
    if (o < O) add<NB, 1, true>(x, row + o, w.stride, count, O - o, sums + o * NB);
  }
  for (int64_t o = 0, width; o < O; o += width) {
    width = o + kWide <= O ? kWide : std::min<int64_t>(kLanes, O - o);
    const int64_t each = width == kWide ? kWide : kLanes;
    for (int b = 0; b < NB; b++) {
      std::copy_n(sums + o * NB + b * each, width, y + b * y_stride + o);
    }
  }
}

template <int NB, typename T>
void multiply_all(ffi::ThreadPool& pool, const float* x_BI, const T* w_IO,
                  int64_t I, int64_t O, float* y_BO) {
  std::vector<float> x_IB(I * NB);
  for (int64_t i = 0; i < I; i++) {
    for (int b = 0; b < NB; b++) x_IB[i * NB + b] = x_BI[b * I + i];
  }
  const int64_t num_bytes = I * O * sizeof(T);
  const int64_t most = std::max<int64_t>(1, num_bytes / kPieceBytes);
  const int64_t num_threads = std::min(pool.num_threads(), most);
  constexpr int64_t kUnit = 6 * kLanes;
  const int64_t each = (O / std::max<int64_t>(1, num_threads) / kUnit + 1) * kUnit;
  const int64_t width = std::min({kOutputs, each});
  share(pool, num_threads, (O + width - 1) / width, [&](int64_t piece) {
    const int64_t o = piece * width;
    const Matrix<T> part = {w_IO + o, I, O, std::min(width, O - o)};
    multiply<NB>(x_IB.data(), part, y_BO + o, O);
  });
}

template <typename T, int NB = kMostRows>
void by_rows(ffi::ThreadPool& pool, int64_t B, const float* x_BI, const T* w_IO,
             int64_t I, int64_t O, float* y_BO) {
  if (B == NB) {
    multiply_all<NB>(pool, x_BI, w_IO, I, O, y_BO);
  } else if constexpr (NB > 1) {
    by_rows<T, NB - 1>(pool, B, x_BI, w_IO, I, O, y_BO);
  }
}

ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x_BI,
                   ffi::AnyBuffer w, ffi::ResultBuffer<ffi::F32> y_BO) {
  const int64_t B = x_BI.dimensions()[0], I = x_BI.dimensions()[1];
  const int64_t O = y_BO->dimensions()[1];
  const auto run = [&](auto* w_IO) {
    for (int64_t b = 0; b < B; b += kMostRows) {
      by_rows(pool, std::min<int64_t>(B - b, kMostRows),
              x_BI.typed_data() + b * I, w_IO, I, O, y_BO->typed_data() + b * O);
    }
    return ffi::Error::Success();
  };
  switch (w.element_type()) {
    case ffi::F32: return run(static_cast<const float*>(w.untyped_data()));
    case ffi::BF16: return run(static_cast<const BFloat16*>(w.untyped_data()));
    case ffi::S8: return run(static_cast<const int8_t*>(w.untyped_data()));
    default: return ffi::Error::InvalidArgument("product: dtype of the matrix");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MooncakeProduct, Product,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
