// Causal convolution of each channel over the last tokens, in float32, with an activation.
//
// A channel of a token is computed alone and its taps are added in order, so its bits do not depend on how a prompt is
// divided or on other requests.
#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr double kTapNs = 0.12;  // one thread's time for one tap of one channel

template <class T> void convolve(const ConvolveArguments& a, int64_t token) {
  const T* const rows = static_cast<const T*>(a.rows);
  const int64_t* const taps = a.tap_rows + token * a.taps;
  T* const out = static_cast<T*>(a.out) + token * a.channels;
  for (int64_t c = 0; c < a.channels; c += kLanes) {
    const int count = int(min64(kLanes, a.channels - c));
    f32x16 sum{};
    for (int64_t tap = 0; tap < a.taps; ++tap)
      sum = fma(load16(rows + taps[tap] * a.channels + c, count), load16(a.weight + tap * a.channels + c, count), sum);
    if (a.bias) sum = sum + load16(a.bias + c, count);
    store16(out + c, a.has_activation ? activate(kSilu, sum) : sum, count);
  }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_convolve(const ConvolveArguments* a) {
  with_dtype(a->dtype, [a](auto tag) {
    const double cost = double(a->num_tokens * a->channels) * double(a->taps + 4 * a->has_activation) * kTapNs;
    Pool::run(a->num_tokens, split(a->num_tokens, cost, a->threads), [a](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token) convolve<decltype(tag)>(*a, token);
    });
  });
}
