// Matrices whose rows and columns nearly sum to one (Sinkhorn and Knopp), one for each token.
//
// A token's matrix is made by one thread in one order, so its bits do not depend on other tokens.
#include <algorithm>
#include <cmath>

#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr double kDivisionNs = 1.5;

void softmax_row(const float* logits, float* out, int64_t size, float eps) {
  const float most = *std::max_element(logits, logits + size);
  float sum = 0.0f;
  for (int64_t i = 0; i < size; ++i) sum += out[i] = std::exp(logits[i] - most);
  for (int64_t i = 0; i < size; ++i) out[i] = out[i] / sum + eps;
}

// Of `size` lines, whose elements are `step` apart.
void divide_lines(float* matrix, int64_t size, int64_t line, int64_t step, float eps) {
  for (int64_t i = 0; i < size; ++i) {
    float* first = matrix + i * line;
    float sum = first[0];
    for (int64_t j = 1; j < size; ++j) sum += first[j * step];
    sum += eps;
    for (int64_t j = 0; j < size; ++j) first[j * step] /= sum;
  }
}

void balance(const float* logits, float* out, int64_t size, int64_t iterations, float eps) {
  for (int64_t row = 0; row < size; ++row) softmax_row(logits + row * size, out + row * size, size, eps);
  divide_lines(out, size, 1, size, eps);
  for (int64_t i = 1; i < iterations; ++i) {
    divide_lines(out, size, size, 1, eps);
    divide_lines(out, size, 1, size, eps);
  }
}

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_balance(const BalanceArguments* a) {
  const double divisions = double(a->num_tokens * a->size * a->size) * double(2 * a->iterations);
  Pool::run(a->num_tokens, split(a->num_tokens, divisions * kDivisionNs, a->threads), [a](int64_t first, int64_t last) {
    for (int64_t token = first; token < last; ++token)
      balance(a->logits + token * a->stride, a->out + token * a->size * a->size, a->size, a->iterations, float(a->eps));
  });
}
