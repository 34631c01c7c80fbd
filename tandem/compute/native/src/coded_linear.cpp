// x @ weight.T with quantised weights (`coded_tiles.h`), and the packing of these into strips (`coded.h`).
#include "coded_product.h"
#include "gating.h"

namespace tandem {
namespace {

// Up to three matrices of the same inputs and segments, whose products lie side by side in the output.
template <class T, class Out> struct CodedLinear {
  struct Part {
    const CodedWeights* weights;
    const T* bias;
    int64_t panels() const { return weights ? ceil_div(num_strips(*weights), kPanelStrips) : 0; }
  };
  Part part[3];
  Out* out;
  int64_t ldo;

  int64_t panels() const { return part[0].panels() + part[1].panels() + part[2].panels(); }

  // NOTE: past the end of a matrix it is the last strip again, whose sums are then stored twice.
  void panel(int64_t index, CodedStrip* codes, Strip<T>* strips) const {
    const Part* p = part;
    int64_t column = 0;
    for (; index >= p->panels(); ++p) index -= p->panels(), column += p->weights->n;
    for (int s = 0; s < kPanelStrips; ++s) {
      const int64_t strip = min64(index * kPanelStrips + s, num_strips(*p->weights) - 1), row = strip * kStrip;
      codes[s] = {p->weights, strip};
      if (strips)
        strips[s] = {nullptr, p->bias ? p->bias + row : nullptr, column + row, int(min64(kStrip, p->weights->n - row))};
    }
  }

  void store(const f32x16 (*sums)[kPanelStrips], int64_t row, int rows, const Strip<T>* strips) const {
    for (int s = 0; s < kPanelStrips; ++s) {
      const f32x16 shift = bias_of(strips[s]);
      for (int m = 0; m < rows; ++m)
        store16(out + (row + m) * ldo + strips[s].column, sums[m][s] + shift, strips[s].rows);
    }
  }

  void run(const T* x, int64_t ldx, int64_t m_size, int num_threads) const {
    bool has_offsets = false;
    for (const Part& p : part) has_offsets |= p.weights && p.weights->offsets;
    CodedProduct<T, CodedLinear>(*part[0].weights, has_offsets, *this, num_threads).run(x, ldx, m_size);
  }
};

// A panel is a strip of gate rows and the up rows beside them.
template <class T> struct CodedGatedLinear {
  const CodedWeights *gate, *up;
  const T *gate_bias, *up_bias;
  T* out;
  int64_t ldo;
  Gating gating;

  int64_t panels() const { return num_strips(*gate); }

  void panel(int64_t index, CodedStrip* codes, Strip<T>* strips) const {
    const int64_t row = index * kStrip;
    const int rows = int(min64(kStrip, gate->n - row));
    codes[0] = {gate, index}, codes[1] = {up, index};
    if (!strips) return;
    strips[0] = {nullptr, gate_bias ? gate_bias + row : nullptr, row, rows};
    strips[1] = {nullptr, up_bias ? up_bias + row : nullptr, row, rows};
  }

  void store(const f32x16 (*sums)[kPanelStrips], int64_t row, int rows, const Strip<T>* strips) const {
    const f32x16 gate_shift = bias_of(strips[0]), up_shift = bias_of(strips[1]);
    for (int m = 0; m < rows; ++m)
      store16(out + (row + m) * ldo + strips->column, gating(sums[m][0] + gate_shift, sums[m][1] + up_shift),
              strips->rows);
  }

  void run(const T* x, int64_t ldx, int64_t m_size, int num_threads) const {
    CodedProduct<T, CodedGatedLinear>(*gate, gate->offsets, *this, num_threads).run(x, ldx, m_size);
  }
};

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_coded_linear(const CodedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const auto into = [&](auto* out) {
      using Out = std::remove_pointer_t<decltype(out)>;
      const CodedLinear<T, Out> linear{{{a->weights, static_cast<const T*>(a->bias)}, {}, {}}, out, a->out_stride};
      linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
    };
    if (a->out_dtype == kFloat32) return into(static_cast<float*>(a->out));
    into(static_cast<T*>(a->out));
  });
}

TANDEM_EXPORT void tandem_coded_gated_linear(const CodedGatedLinearArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    const CodedGatedLinear<T> linear{a->gate, a->up, static_cast<const T*>(a->gate_bias),
                                     static_cast<const T*>(a->up_bias), static_cast<T*>(a->out), a->out_stride,
                                     Gating{int(a->activation)}};
    linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
  });
}

void tandem_joined_coded_linear(const JoinedCodedArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    using T = decltype(tag);
    CodedLinear<T, T> linear{{}, static_cast<T*>(a->out), a->out_stride};
    for (int i = 0; i < 3; ++i) linear.part[i] = {a->parts[i].weights, static_cast<const T*>(a->parts[i].bias)};
    linear.run(static_cast<const T*>(a->x), a->x_stride, a->m, int(a->threads));
  });
}

TANDEM_EXPORT void tandem_pack_coded(const PackCodedArguments* a) {
  const CodedWeights &w = *a->weights, &to = *a->packed;
  const int64_t lanes = strip_lanes(w), strips = num_strips(w);
  const auto pack = [&](int64_t i, const void* from, int64_t groups, int64_t dtype, const void* into) {
    const int64_t size = groups * kStrip * scale_bytes(dtype);
    if (from) pack_scales(w, i, from, groups, dtype, static_cast<char*>(const_cast<void*>(into)) + i * size);
  };
  const double cost = double(strips * lanes) * 4.0;
  Pool::run(strips, split(strips, cost, int(a->threads)), [&](int64_t i, int64_t last) {
    for (; i < last; ++i) {
      pack_codes(w, i, static_cast<uint32_t*>(const_cast<void*>(to.codes)) + i * lanes);
      pack(i, w.scales, num_groups(w), w.scale_dtype, to.scales);
      pack(i, w.offsets, num_groups(w), w.offset_dtype, to.offsets);
      pack(i, w.super_scales, num_supers(w), kFloat16, to.super_scales);
      pack(i, w.super_offsets, num_supers(w), kFloat16, to.super_offsets);
    }
  });
}
