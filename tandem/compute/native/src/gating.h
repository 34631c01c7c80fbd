// Activation of a gated block: combines its gate and up products.
#pragma once
#include "common.h"

namespace tandem {

struct Gating {
  int activation;
  float alpha = 0.0f, limit = 0.0f, shift = 0.0f;  // of the clamped one

  inline __attribute__((always_inline)) f32x16 operator()(f32x16 gate, f32x16 up) const {
    if (activation != kClampedSwiGlu) return activate(activation, gate) * up;
    gate = vmin(splat(limit), gate);  // NOTE: in this order a NaN stays one
    up = vmax(splat(-limit), vmin(splat(limit), up));
    return (up + splat(shift)) * (gate * sigmoid_16(splat(alpha) * gate));
  }
};

}  // namespace tandem
