// Copies of rows, gated products, norms and rotary embedding: one pass over each row, float32 inside, rounded once at
// the end.
//
// A row is always computed by one thread in one order, so its bits do not depend on the other rows.
#include <cmath>

#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr double kNormNs = 0.2, kRopeNs = 0.3, kGateNs = 0.5;  // one thread's time per element
constexpr double kCopyNs = 0.1;  // and per byte
constexpr int kMaxHeadDim = 512;

// Weights come in the tensor's dtype or in float32.
struct Weight {
  const void* data;
  int dtype;
  float offset;

  f32x16 at(int64_t i, int count) const {
    const f32x16 base = splat(offset);
    if (dtype == kBFloat16) return base + load16(static_cast<const bf16*>(data) + i, count);
    if (dtype == kFloat16) return base + load16(static_cast<const fp16*>(data) + i, count);
    return base + load16(static_cast<const float*>(data) + i, count);
  }
};

template <class Body> TANDEM_INLINE void for_each_vector(int64_t size, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) body(i, kLanes);
  if (i < size) body(i, int(size - i));
}

TANDEM_INLINE float inverse_rms(f32x16 squares, int64_t size, float eps) {
  return 1.0f / std::sqrt(reduce_add(squares) / float(size) + eps);
}

template <class T>
void norm_row(const T* x, T* residual, const Weight& weight, float eps, int64_t size, T* out) {
  f32x16 squares{};
  for_each_vector(size, [&](int64_t i, int count) {
    f32x16 v = load16(x + i, count);
    if (residual) {
      store16(residual + i, v + load16(residual + i, count), count);
      v = load16(residual + i, count);
    }
    squares = fma(v, v, squares);
  });
  const f32x16 scale = splat(inverse_rms(squares, size, eps));
  const T* source = residual ? residual : x;
  for_each_vector(size, [&](int64_t i, int count) {
    store16(out + i, load16(source + i, count) * scale * weight.at(i, count), count);
  });
}

template <class T>
void rms_norm(const T* x, Matrix xs, T* residual, Matrix rs, T* out, Matrix os, const Weight& weight, float eps,
              int64_t outer, int64_t inner, int64_t size, int num_threads) {
  Pool::run(outer * inner, split(outer * inner, double(outer * inner * size) * kNormNs, num_threads),
            [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t i = row / inner, j = row % inner;
      norm_row(x + i * xs.outer_stride + j * xs.inner_stride,
               residual ? residual + i * rs.outer_stride + j * rs.inner_stride : nullptr, weight, eps, size,
               out + i * os.outer_stride + j * os.inner_stride);
    }
  });
}

template <class T>
void gated_product(const T* gate, int64_t gate_stride, const T* up, int64_t up_stride, T* out, int64_t out_stride,
                   int activation, int64_t m, int64_t n, int num_threads) {
  Pool::run(m, split(m, double(m * n) * kGateNs, num_threads), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      for_each_vector(n, [&](int64_t i, int count) {
        const f32x16 gated = activate(activation, load16(gate + row * gate_stride + i, count));
        store16(out + row * out_stride + i, gated * load16(up + row * up_stride + i, count), count);
      });
  });
}

// One head of one token: optional norm, then (a, b) -> (a cos - b sin, b cos + a sin), in place.
template <class T>
void rotate_head(T* head, const Weight& weight, float eps, const float* cos, const float* sin, int head_dim, int half) {
  alignas(64) float values[kMaxHeadDim + kLanes];
  f32x16 squares{};
  for_each_vector(head_dim, [&](int64_t i, int count) {
    const f32x16 v = load16(head + i, count);
    store16(values + i, v, count);
    squares = fma(v, v, squares);
  });
  if (weight.data) {
    const f32x16 scale = splat(inverse_rms(squares, head_dim, eps));
    for_each_vector(head_dim, [&](int64_t i, int count) {
      store16(values + i, load16(values + i, count) * scale * weight.at(i, count), count);
    });
  }
  for_each_vector(half, [&](int64_t i, int count) {
    const f32x16 a = load16(values + i, count), b = load16(values + half + i, count);
    const f32x16 c = load16(cos + i, count), s = load16(sin + i, count);
    store16(head + i, fma(a, c, -(b * s)), count);
    store16(head + half + i, fma(b, c, a * s), count);
  });
  if (weight.data) {
    for_each_vector(head_dim - 2 * half, [&](int64_t i, int count) {
      store16(head + 2 * half + i, load16(values + 2 * half + i, count), count);
    });
  }
}

template <class T> struct Rope {
  T *q, *k, *v, *k_cache, *v_cache;
  Matrix qs, ks, vs;
  const float *cos, *sin;
  const int64_t *positions, *slots;
  int64_t k_block_stride, v_block_stride;
  Weight q_norm, k_norm;
  float eps;
  int num_heads, num_kv_heads, head_dim, half, block_size;

  void run(int64_t token) const {
    const float *c = cos + positions[token] * half, *s = sin + positions[token] * half;
    for (int h = 0; h < num_heads; ++h)
      rotate_head(q + token * qs.outer_stride + h * qs.inner_stride, q_norm, eps, c, s, head_dim, half);
    for (int h = 0; h < num_kv_heads; ++h) {
      T* key = k + token * ks.outer_stride + h * ks.inner_stride;
      rotate_head(key, k_norm, eps, c, s, head_dim, half);
      const int64_t slot = slots[token];
      if (slot < 0) continue;
      const int64_t block = slot / block_size, inner = (int64_t(h) * block_size + slot % block_size) * head_dim;
      std::memcpy(k_cache + block * k_block_stride + inner, key, head_dim * sizeof(T));
      std::memcpy(v_cache + block * v_block_stride + inner, v + token * vs.outer_stride + h * vs.inner_stride,
                  head_dim * sizeof(T));
    }
  }
};

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_take_rows(const TakeRowsArguments* a) {
  Pool::run(a->n, split(a->n, double(a->n * a->row_bytes) * kCopyNs, a->threads), [a](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      std::memcpy(a->out + i * a->row_bytes, a->x + a->indices[i] * a->stride_bytes, size_t(a->row_bytes));
  });
}

TANDEM_EXPORT void tandem_gated_product(const GatedProductArguments* a) {
  with_dtype(a->dtype, [&](auto tag) {
    using T = decltype(tag);
    gated_product(static_cast<const T*>(a->gate), a->gate_stride, static_cast<const T*>(a->up), a->up_stride,
                  static_cast<T*>(a->out), a->out_stride, int(a->activation), a->m, a->n, int(a->threads));
  });
}

TANDEM_EXPORT void tandem_rms_norm(const RmsNormArguments* a) {
  const Weight weight{a->weight, int(a->weight_dtype), a->unit_offset ? 1.0f : 0.0f};
  with_dtype(a->dtype, [&](auto tag) {
    using T = decltype(tag);
    rms_norm(static_cast<const T*>(a->x), a->x_strides, static_cast<T*>(a->residual), a->residual_strides,
             static_cast<T*>(a->out), a->out_strides, weight, float(a->eps), a->outer, a->inner, a->size,
             int(a->threads));
  });
}

TANDEM_EXPORT void tandem_rope_and_write(const RopeAndWriteArguments* a) {
  const float offset = a->unit_offset ? 1.0f : 0.0f;
  const Weight q_norm{a->q_norm, int(a->norm_dtype), offset}, k_norm{a->k_norm, int(a->norm_dtype), offset};
  with_dtype(a->dtype, [&](auto tag) {
    using T = decltype(tag);
    const Rope<T> rope{static_cast<T*>(a->q), static_cast<T*>(a->k), static_cast<T*>(a->v),
                       static_cast<T*>(a->k_cache), static_cast<T*>(a->v_cache),
                       a->q_strides, a->k_strides, a->v_strides, a->cos, a->sin, a->positions, a->slots,
                       a->k_block_stride, a->v_block_stride, q_norm, k_norm, float(a->eps),
                       int(a->num_heads), int(a->num_kv_heads), int(a->head_dim), int(a->half), int(a->block_size)};
    const int64_t elements = a->num_tokens * (a->num_heads + a->num_kv_heads) * a->head_dim;
    Pool::run(a->num_tokens, split(a->num_tokens, double(elements) * kRopeNs, a->threads),
              [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token) rope.run(token);
    });
  });
}
