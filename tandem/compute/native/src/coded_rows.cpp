// Rows of a quantised matrix as floats: lookups of embeddings by token.
#include "coded_tiles.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr double kNsPerNumber = 1.0;

// The number of a code, input `i` of a step, from the lanes of one output.
float number_of(const CodedWeights& w, const uint32_t* lanes, int i) {
  if (w.kind == kTable4) return w.table[lanes[0] >> (4 * (i / 2) + 16 * (i % 2)) & 15];
  const uint32_t code = lanes[i / 4 * kStrip] >> 8 * (i % 4) & 255;
  return w.kind == kInt8 ? float(int8_t(code)) : e4m3_byte(UintVec{} + code, 0)[0];
}

template <class T> void decode_row(const CodedWeights& w, const CodedShape& shape, int64_t row, T* out) {
  const int lane = int(row % kStrip);
  const OpenStrip strip = open_strip({&w, row / kStrip}, shape, 0, {int(w.kind), 1.0});
  for (int64_t at = 0; at < w.k; ++at) {
    const int64_t segment = at / shape.segment, step = at / kStepInputs;
    const uint32_t* const lanes = strip.lanes + step * step_lanes(w.kind) + lane;
    const float scaled = number_of(w, lanes, int(at % kStepInputs)) * strip.scales[segment][lane];
    out[w.permutation ? w.permutation[at] : at] =
        from_float<T>(strip.offsets ? scaled + strip.offsets[segment][lane] : scaled);
  }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_coded_rows(const CodedRowsArguments* a) {
  const CodedWeights& w = *a->weights;
  const CodedShape shape{w.k, segment_of(w)};
  with_dtype(a->dtype, [&](auto tag) {
    using T = decltype(tag);
    Pool::run(a->n, split(a->n, double(a->n * w.k) * kNsPerNumber, int(a->threads)), [&](int64_t i, int64_t last) {
      for (; i < last; ++i) decode_row(w, shape, a->indices[i], static_cast<T*>(a->out) + i * w.k);
    });
  });
}
