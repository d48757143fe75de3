// SPDX-License-Identifier: Apache-2.0
// Products of a few rows with a large matrix, at the speed of reading it.
//
// The matrix is read once: a few of its rows over some of its columns for the
// first rows of x, while as many next ones are asked for; the other rows of x
// find them in the cache. Sums stay there too.
//
// B row, I input, O output.

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "lanes.h"
#include "share.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kGroup = 8;          // rows of x at a time
constexpr int64_t kInputs = 4;     // of the matrix as it comes from memory
constexpr int64_t kBlock = 32;     // of it that the other groups find
constexpr int64_t kOutputs = 768;  // as wide as was fastest (LOG.md)
constexpr int64_t kPieceBytes = 1 << 17;  // less is not worth a thread

// Adds `count` inputs to the sums of NB rows and NO lanes of outputs.
template <int NB, int NO, bool kCut, typename T>
[[gnu::always_inline]] inline void add(const float* x_IB, const T* w_IO,
                                       int64_t stride, int count, int cut,
                                       int64_t ahead, float* sums) {
  Lanes y[NB][NO];
#pragma GCC unroll 8
  for (int b = 0; b < NB; b++) {
#pragma GCC unroll 8
    for (int o = 0; o < NO; o++) y[b][o] = load(sums + (b * NO + o) * kLanes);
  }
  for (int i = 0; i < count; i++, w_IO += stride, x_IB += NB) {
    Lanes w[NO];
#pragma GCC unroll 8
    for (int o = 0; o < NO; o++) {
      const T* at = w_IO + o * kLanes;
      w[o] = kCut ? load_some(at, cut) : load(at);
      __builtin_prefetch(at + ahead, 0, 3);
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
    for (int o = 0; o < NO; o++) store(sums + (b * NO + o) * kLanes, y[b][o]);
  }
}

// Lanes of outputs at a time: as many sums as there are registers.
constexpr int wide(int num_rows) { return num_rows > 4 ? 3 : 6; }

// The same over all outputs of a piece, whose sums lie tile after tile. The
// first rows of x have the matrix come, a few inputs at a time.
template <int NB, bool kFirst, typename T>
void add_all(const float* x_IB, const T* w_IO, int64_t stride, int64_t num,
             int64_t O, float* sums) {
  constexpr int64_t kWide = wide(NB) * kLanes;
  const int64_t step = kFirst ? kInputs : num;
  const int64_t ahead = kFirst ? kInputs * stride : 0;
  for (int64_t i = 0; i < num; i += step) {
    const int count = kFirst ? std::min<int>(kInputs, num - i) : num;
    const float* x = x_IB + i * NB;
    const T* w = w_IO + i * stride;
    int64_t o = 0;
    for (; o + kWide <= O; o += kWide) {
      add<NB, wide(NB), false>(x, w + o, stride, count, 0, ahead,
                               sums + o * NB);
    }
    for (; o + kLanes <= O; o += kLanes) {
      add<NB, 1, false>(x, w + o, stride, count, 0, ahead, sums + o * NB);
    }
    if (o < O) {
      add<NB, 1, true>(x, w + o, stride, count, O - o, ahead, sums + o * NB);
    }
  }
}

template <bool kFirst, typename T, int... NB>
constexpr auto by_rows(std::integer_sequence<int, NB...>) {
  return std::array{add_all<NB + 1, kFirst, T>...};
}

// Some rows of x.
struct Group {
  int num_rows;
  const float* x_IB;
};

// y[b, 0:O] of all rows; y's rows are `y_stride` long.
template <typename T>
void multiply(const std::vector<Group>& groups, const T* w_IO, int64_t stride,
              int64_t I, int64_t O, float* y, int64_t y_stride) {
  constexpr auto sizes = std::make_integer_sequence<int, kGroup>();
  constexpr auto first = by_rows<true, T>(sizes);
  constexpr auto others = by_rows<false, T>(sizes);
  const int64_t each = kGroup * ((O + kLanes - 1) / kLanes) * kLanes;
  std::vector<Lanes> memory(groups.size() * each / kLanes);  // aligned
  float* sums = reinterpret_cast<float*>(memory.data());
  const int64_t block = kBlock;
  for (int64_t i = 0; i < I; i += block) {
    for (size_t g = 0; g < groups.size(); g++) {
      const auto [num, x_IB] = groups[g];
      const auto add_to = g ? others[num - 1] : first[num - 1];
      add_to(x_IB + i * num, w_IO + i * stride, stride, std::min(block, I - i),
             O, sums + g * each);
    }
  }
  for (size_t g = 0; g < groups.size(); g++) {
    const int num = groups[g].num_rows;
    const int64_t tile = wide(num) * kLanes;
    for (int64_t o = 0, width; o < O; o += width) {
      const int64_t lanes = o + tile <= O ? tile : kLanes;
      width = std::min(lanes, O - o);
      const float* own = sums + g * each + o * num;
      for (int b = 0; b < num; b++) {
        std::copy_n(own + b * lanes, width,
                    y + (g * kGroup + b) * y_stride + o);
      }
    }
  }
}

template <typename T>
void multiply_all(ffi::ThreadPool& pool, int64_t B, const float* x_BI,
                  const T* w_IO, int64_t I, int64_t O, float* y_BO) {
  std::vector<float> x(B * I);
  std::vector<Group> groups;
  for (int64_t b = 0; b < B; b += kGroup) {
    const int num = std::min<int64_t>(kGroup, B - b);
    groups.push_back({num, x.data() + b * I});
    for (int64_t i = 0; i < I; i++) {
      for (int j = 0; j < num; j++) {
        x[b * I + i * num + j] = x_BI[(b + j) * I + i];
      }
    }
  }
  const int64_t worth = I * O * int64_t{sizeof(T)} / kPieceBytes + 1;
  const int64_t num_threads = std::min(pool.num_threads(), worth);
  constexpr int64_t kUnit = 6 * kLanes;
  const int64_t own = O / std::max<int64_t>(1, num_threads);
  const int64_t width = std::min(kOutputs, (own / kUnit + 1) * kUnit);
  share(pool, num_threads, (O + width - 1) / width, [&](int64_t piece) {
    const int64_t o = piece * width;
    multiply(groups, w_IO + o, O, I, std::min(width, O - o), y_BO + o, O);
  });
}

ffi::Error Product(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x_BI,
                   ffi::AnyBuffer w, ffi::Buffer<ffi::S32> layer,
                   ffi::ResultBuffer<ffi::F32> y_BO) {
  const int64_t B = x_BI.dimensions()[0], I = x_BI.dimensions()[1];
  const int64_t O = y_BO->dimensions()[1];
  const auto run = [&](auto* w_LIO) {
    const auto* w_IO = w_LIO + layer.typed_data()[0] * I * O;
    multiply_all(pool, B, x_BI.typed_data(), w_IO, I, O, y_BO->typed_data());
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
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>());
