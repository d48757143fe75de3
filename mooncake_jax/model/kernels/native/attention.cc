// SPDX-License-Identifier: Apache-2.0
// Attention of one query a row over paged KVCache, pages read in place.
//
// Keys and values are read once; a tile of them stays in the first cache while
// all query heads of its KV head use it. The softmax runs along as in
// FlashAttention: sums of a row's pages may be taken in pieces on several
// threads and put together (FlashDecoding).
//
// B row, K KV head, G query heads a KV head, N = K * G, H head dim, P pages of
// a row's table, C token in a page, S token in a tile.

#include <algorithm>
#include <cmath>
#include <vector>

#include "lanes.h"
#include "share.h"

namespace ffi = xla::ffi;

namespace {

constexpr int kTile = 64;             // tokens
constexpr int64_t kPieceBytes = 1 << 17;  // less is not worth a thread
constexpr float kMasked = -1e30f;

struct Sizes {
  int64_t B, K, G, H, P, C;
  int64_t lanes_h() const { return (H + kLanes - 1) / kLanes; }
  int64_t padded_h() const { return lanes_h() * kLanes; }
};

// Tokens [first, last) of a row, and where their sums stand.
struct Piece {
  int64_t row, first, last;
};

// Of the keys so far, by query head: maximum, sum, weighted values.
struct Sums {
  float* top_N;
  float* sum_N;
  float* out_NH;  // heads padded
};

// Scores of 16 tokens for one query; `num` of them are there. Asks for what is
// `ahead` as far, a line at a time: a burst would wait for itself.
template <typename T>
Lanes scores(const float* q_H, const T* k_SH, const T* ahead_SH,
             int64_t stride, int num, const Sizes& sizes) {
  Lanes dot[kLanes] = {};
  int64_t h = 0;
  if (num == kLanes) {
    for (; h + kLanes <= sizes.H; h += kLanes) {
      const Lanes q = load(q_H + h);
#pragma GCC unroll 16
      for (int t = 0; t < kLanes; t++) {
        dot[t] += q * load(k_SH + t * stride + h);
        __builtin_prefetch(ahead_SH + t * stride + h, 0, 3);
      }
    }
  }
  for (; h < sizes.H; h += kLanes) {
    const Lanes q = load(q_H + h);
#pragma GCC unroll 16
    for (int t = 0; t < kLanes; t++) {
      if (t < num) dot[t] += q * load_some(k_SH + t * stride + h, sizes.H - h);
    }
  }
  const Lanes sums = sums_of(dot);
  const IntLanes lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return lane < num ? sums : splat(kMasked);
}

// Adds a tile's values to NG queries' outputs, NH lanes from h on; the last
// ones may be cut.
template <int NG, int NH, bool kCut, typename T>
void weigh(const float* p_GS, const T* v_SH, const T* ahead_SH,
           int64_t stride, int num, const float* keep_G, float* out_GH,
           const Sizes& sizes) {
  const int64_t width = sizes.padded_h();
  Lanes out[NG][NH];
#pragma GCC unroll 4
  for (int g = 0; g < NG; g++) {
#pragma GCC unroll 4
    for (int i = 0; i < NH; i++) {
      out[g][i] = load(out_GH + g * width + i * kLanes) * keep_G[g];
    }
  }
  for (int t = 0; t < num; t++, p_GS++) {
    Lanes v[NH];
#pragma GCC unroll 4
    for (int i = 0; i < NH; i++) {
      const T* at = v_SH + t * stride + i * kLanes;
      v[i] = kCut ? load_some(at, sizes.H % kLanes) : load(at);
      __builtin_prefetch(ahead_SH + t * stride + i * kLanes, 0, 3);
    }
#pragma GCC unroll 4
    for (int g = 0; g < NG; g++) {
#pragma GCC unroll 4
      for (int i = 0; i < NH; i++) out[g][i] += v[i] * p_GS[g * kTile];
    }
  }
#pragma GCC unroll 4
  for (int g = 0; g < NG; g++) {
#pragma GCC unroll 4
    for (int i = 0; i < NH; i++) {
      store(out_GH + g * width + i * kLanes, out[g][i]);
    }
  }
}

template <int NG, typename T>
void weigh_all(const float* p_GS, const T* v_SH, const T* ahead_SH,
               int64_t stride, int num, const float* keep_G, float* out_GH,
           const Sizes& sizes) {
  const auto go = [&](auto weigh_them, int64_t h) {
    weigh_them(p_GS, v_SH + h, ahead_SH + h, stride, num, keep_G, out_GH + h,
               sizes);
  };
  int64_t h = 0, H = sizes.H;
  for (; h + 4 * kLanes <= H; h += 4 * kLanes) go(weigh<NG, 4, false, T>, h);
  for (; h + kLanes <= H; h += kLanes) go(weigh<NG, 1, false, T>, h);
  if (h < H) go(weigh<NG, 1, true, T>, h);
}

// Adds up to kTile tokens of one KV head to its queries' sums.
template <typename T>
void add_tile(const float* q_GH, const T* k_SH, const T* v_SH,
              const T* next_SH, int num, Sums sums, const Sizes& sizes) {
  const int64_t stride = sizes.K * sizes.H, width = sizes.padded_h();
  for (int64_t g = 0; g < sizes.G; g += 4) {
    const int count = std::min<int64_t>(4, sizes.G - g);
    float p_GS[4 * kTile], keep_G[4];
    for (int i = 0; i < count; i++) {
      float* p_S = p_GS + i * kTile;
      Lanes most = splat(sums.top_N[g + i]);
      for (int s = 0; s < num; s += kLanes) {
        const Lanes score = scores(
            q_GH + (g + i) * width, k_SH + s * stride, v_SH + s * stride,
            stride, std::min(kLanes, num - s), sizes);
        store(p_S + s, score);
        most = larger(most, score);
      }
      const float top = max_of(most);
      Lanes total = {};
      for (int s = 0; s < num; s += kLanes) {
        const Lanes p = exp_of(load(p_S + s) - top);
        store(p_S + s, p);
        total += p;
      }
      keep_G[i] = std::exp(sums.top_N[g + i] - top);
      sums.sum_N[g + i] = sums.sum_N[g + i] * keep_G[i] + sum_of(total);
      sums.top_N[g + i] = top;
    }
    float* out_GH = sums.out_NH + g * width;
    const auto weigh_them = count == 4   ? weigh_all<4, T>
                            : count == 3 ? weigh_all<3, T>
                            : count == 2 ? weigh_all<2, T>
                                         : weigh_all<1, T>;
    weigh_them(p_GS, v_SH, next_SH, stride, num, keep_G, out_GH, sizes);
  }
}

template <typename T>
void add_piece(const Piece& piece, const float* q_NH, const T* kv_P2CKH,
               const int32_t* table_P, Sums sums, const Sizes& sizes) {
  const int64_t half = sizes.C * sizes.K * sizes.H;  // keys of a page
  const int64_t width = sizes.padded_h();
  for (int64_t token = piece.first; token < piece.last;) {
    const int64_t at = token % sizes.C;
    const int num = std::min<int64_t>(
        {kTile, sizes.C - at, piece.last - token});
    const T* page = kv_P2CKH + table_P[token / sizes.C] * 2 * half;
    const T* k_SKH = page + at * sizes.K * sizes.H;
    const int64_t next = std::min(token + num, piece.last - 1);
    const T* next_SKH = kv_P2CKH + table_P[next / sizes.C] * 2 * half +
                        next % sizes.C * sizes.K * sizes.H;
    for (int64_t k = 0; k < sizes.K; k++) {
      const int64_t n = k * sizes.G;
      add_tile(q_NH + n * width, k_SKH + k * sizes.H,
               k_SKH + half + k * sizes.H, next_SKH + k * sizes.H, num,
               Sums{sums.top_N + n, sums.sum_N + n, sums.out_NH + n * width},
               sizes);
    }
    token += num;
  }
}

// The rows' visible tokens, a row in several pieces if there are threads.
std::vector<Piece> cut(const int32_t* start_B, const int32_t* stop_B,
                       int64_t window, int64_t num_threads,
                       int64_t token_bytes, const Sizes& sizes) {
  std::vector<Piece> rows;
  int64_t total = 0;
  for (int64_t b = 0; b < sizes.B; b++) {
    const int64_t last = std::min(
        {int64_t{stop_B[b]}, int64_t{start_B[b]} + 1, sizes.P * sizes.C});
    const int64_t first =
        window ? std::max<int64_t>(start_B[b] - window + 1, 0) : 0;
    rows.push_back({b, first, std::max(first, last)});
    total += rows.back().last - first;
  }
  const int64_t least = kPieceBytes / token_bytes + 1;
  const int64_t most = std::max(least, (total - 1) / num_threads + 1);
  if (num_threads < 2) return rows;
  std::vector<Piece> pieces;
  for (Piece row : rows) {
    for (; row.last - row.first > most; row.first += most) {
      pieces.push_back({row.row, row.first, row.first + most});
    }
    pieces.push_back(row);
  }
  return pieces;
}

// Puts the sums of a row's pieces together; a row without a key gives zeros.
void finish(const Sums* sums, int64_t count, float* out_NH,
            const Sizes& sizes) {
  const int64_t width = sizes.padded_h();
  for (int64_t n = 0; n < sizes.K * sizes.G; n++) {
    float top = kMasked, total = 0;
    for (int64_t i = 0; i < count; i++) top = std::max(top, sums[i].top_N[n]);
    for (int64_t i = 0; i < count; i++) {
      total += sums[i].sum_N[n] * std::exp(sums[i].top_N[n] - top);
    }
    for (int64_t h = 0; h < sizes.H; h += kLanes) {
      Lanes out = {};
      for (int64_t i = 0; i < count; i++) {
        const float weight =
            std::exp(sums[i].top_N[n] - top) / std::max(total, 1e-30f);
        out += load(sums[i].out_NH + n * width + h) * weight;
      }
      store_some(out_NH + n * sizes.H + h, out, sizes.H - h);
    }
  }
}

template <typename T>
void attend(ffi::ThreadPool& pool, const float* q_BNH, const T* kv_P2CKH,
            const int32_t* table_BP, const int32_t* start_B,
            const int32_t* stop_B, int64_t window, float* out_BNH,
            const Sizes& sizes) {
  const int64_t N = sizes.K * sizes.G, H = sizes.H, width = sizes.padded_h();
  const int64_t num_threads = pool.num_threads();
  const int64_t token_bytes = 2 * sizes.K * H * sizeof(T);
  const std::vector<Piece> pieces =
      cut(start_B, stop_B, window, num_threads, token_bytes, sizes);
  const int64_t count = pieces.size();
  std::vector<float> q_padded(sizes.B * N * width), memory(
      count * N * (2 + width));
  const float scale = 1 / std::sqrt(float(H));
  for (int64_t i = 0; i < sizes.B * N; i++) {
    for (int64_t h = 0; h < H; h++) {
      q_padded[i * width + h] = q_BNH[i * H + h] * scale;
    }
  }
  std::vector<Sums> sums;
  for (int64_t i = 0; i < count; i++) {
    float* own = memory.data() + i * N * (2 + width);
    std::fill(own, own + N, kMasked);
    sums.push_back({own, own + N, own + 2 * N});
  }
  share(pool, num_threads, count, [&](int64_t i) {
    const int64_t row = pieces[i].row;
    add_piece(pieces[i], q_padded.data() + row * N * width, kv_P2CKH,
              table_BP + row * sizes.P, sums[i], sizes);
  });
  for (int64_t i = 0, next; i < count; i = next) {
    const int64_t row = pieces[i].row;
    for (next = i; next < count && pieces[next].row == row;) next++;
    finish(&sums[i], next - i, out_BNH + row * N * H, sizes);
  }
}

ffi::Error Attend(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> q_BKGH,
                  ffi::AnyBuffer kv_LP2CKH, ffi::Buffer<ffi::S32> layer,
                  ffi::Buffer<ffi::S32> table_BP, ffi::Buffer<ffi::S32> start_B,
                  ffi::Buffer<ffi::S32> stop_B, int64_t window,
                  ffi::ResultBuffer<ffi::F32> out_BKGH) {
  const auto q = q_BKGH.dimensions(), kv = kv_LP2CKH.dimensions();
  const Sizes sizes = {q[0], q[1], q[2], q[3], table_BP.dimensions()[1], kv[3]};
  const int64_t at =
      layer.typed_data()[0] * (kv_LP2CKH.element_count() / kv[0]);
  const auto run = [&](auto* pages) {
    attend(pool, q_BKGH.typed_data(), pages + at, table_BP.typed_data(),
           start_B.typed_data(), stop_B.typed_data(), window,
           out_BKGH->typed_data(), sizes);
    return ffi::Error::Success();
  };
  const void* data = kv_LP2CKH.untyped_data();
  switch (kv_LP2CKH.element_type()) {
    case ffi::F32: return run(static_cast<const float*>(data));
    case ffi::BF16: return run(static_cast<const BFloat16*>(data));
    case ffi::S8: return run(static_cast<const int8_t*>(data));
    case ffi::F8E4M3FN: return run(static_cast<const Float8*>(data));
    default: return ffi::Error::InvalidArgument("attention: dtype of KVCache");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    MooncakeAttend, Attend,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::Buffer<ffi::F32>>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Attr<int64_t>("window")
        .Ret<ffi::Buffer<ffi::F32>>());
