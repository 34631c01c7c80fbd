// The choice of experts for each token, from its router's logits. A row is computed by one thread in one order, so its
// bits do not depend on other rows.
//
// Experts are chosen by falling score, the lowest index first if scores are equal. A NaN score counts as the lowest, so
// that the chosen index is always that of an expert.
#include <cfloat>
#include <cmath>

#include "calls.h"
#include "pool.h"

namespace tandem {
namespace {

constexpr double kScoreNs = 0.5, kPickNs = 0.1;  // one thread's time for a logit, and for one each time one is picked

enum Score : int { kSoftmax = 0, kSoftmaxOfChosen = 1, kSigmoid = 2, kSqrtSoftplus = 3 };

TANDEM_INLINE float rounded(float v, int64_t dtype) {
  if (dtype == kBFloat16) return to_float(from_float<bf16>(v));
  if (dtype == kFloat16) return to_float(from_float<fp16>(v));
  return v;
}

// exp(x - max) over their sum, in place; `x` has whole vectors, of which `size` numbers count.
void softmax(float* x, int64_t size) {
  float highest = -INFINITY;
  for (int64_t i = 0; i < size; ++i) highest = x[i] > highest ? x[i] : highest;
  f32x16 sums{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const int count = int(min64(kLanes, size - i));
    store16(x + i, exp_16(load16(x + i, count) - splat(highest)), count);
    sums += load16(x + i, count);
  }
  const f32x16 scale = splat(reduce_add(sums));
  for (int64_t i = 0; i < size; i += kLanes) store16(x + i, load16(x + i) / scale);
}

// Index of the largest of `size` numbers, the first of equal ones; there must be one above -inf. Whole vectors.
int64_t largest(const float* x, int64_t size) {
  f32x16 best = splat(-INFINITY);
  for (int64_t i = 0; i < size; i += kLanes) best = vmax(load16(x + i), best);
  const f32x16 highest = splat(reduce_max(best));
  for (int64_t i = 0; i < size; i += kLanes)
    if (const uint32_t found = bits_set(load16(x + i) == highest)) return i + __builtin_ctz(found);
  return 0;
}

class Router {
 public:
  explicit Router(const ChooseExpertsArguments& arguments)
      : a(arguments), size_(ceil_div(a.num_experts, kLanes) * kLanes) {}

  void run(int64_t row) const {
    thread_local Workspace workspace;
    float* const scores = workspace.reserve(size_t(2 * size_ + a.num_groups + kLanes));
    float *const wanted = scores + size_, *const totals = wanted + size_;
    score(row, scores);
    want(scores, wanted);
    if (a.num_groups > 1) keep_best_groups(wanted, totals);
    int64_t* const chosen = a.chosen + row * a.top_k;
    for (int64_t i = 0; i < a.top_k; ++i) {
      chosen[i] = largest(wanted, size_);
      wanted[chosen[i]] = -INFINITY;
    }
    weigh(scores, chosen, a.weights + row * a.top_k);
  }

 private:
  void score(int64_t row, float* scores) const {
    with_dtype(a.dtype, [&](auto tag) {
      const auto* logits = static_cast<const decltype(tag)*>(a.logits) + row * a.stride;
      for (int64_t i = 0; i < size_; i += kLanes)
        store16(scores + i, load16(logits + i, int(min64(kLanes, a.num_experts - i))) * splat(float(a.logit_scale)));
    });
    if (a.score == kSoftmax) softmax(scores, a.num_experts);
    if (a.score == kSigmoid)
      for (int64_t i = 0; i < size_; i += kLanes) store16(scores + i, sigmoid_16(load16(scores + i)));
    if (a.score == kSqrtSoftplus)
      for (int64_t i = 0; i < a.num_experts; ++i) scores[i] = std::sqrt(softplus(scores[i]));
  }

  // What experts are chosen by: finite, and -inf where there is none.
  void want(const float* scores, float* wanted) const {
    for (int64_t i = 0; i < size_; i += kLanes) {
      f32x16 v = load16(scores + i);
      if (a.correction) v += load16(a.correction + i, int(min64(kLanes, a.num_experts - i)));
      store16(wanted + i, vmax(v, splat(-FLT_MAX)));
    }
    for (int64_t i = a.num_experts; i < size_; ++i) wanted[i] = -INFINITY;
  }

  // A group's total is that of its best one or two; experts of all but the best groups become -inf.
  void keep_best_groups(float* wanted, float* totals) const {
    const int64_t group_size = a.num_experts / a.num_groups;
    for (int64_t g = 0; g < a.num_groups; ++g) totals[g] = best(wanted + g * group_size, group_size);
    for (int64_t i = 0; i < a.top_groups; ++i) {
      int64_t best = 0;
      for (int64_t g = 1; g < a.num_groups; ++g)
        if (totals[g] > totals[best]) best = g;
      totals[best] = -INFINITY;
    }
    for (int64_t g = 0; g < a.num_groups; ++g)
      if (totals[g] > -INFINITY)
        for (int64_t e = 0; e < group_size; ++e) wanted[g * group_size + e] = -INFINITY;
  }

  float best(const float* x, int64_t size) const {
    float first = -FLT_MAX, second = -FLT_MAX;
    for (int64_t i = 0; i < size; ++i) {
      const float lower = x[i] > first ? first : x[i];
      first = x[i] > first ? x[i] : first;
      second = lower > second ? lower : second;
    }
    return a.best_of_group == 1 ? first : std::fmax(first + second, -FLT_MAX);
  }

  void weigh(const float* scores, const int64_t* chosen, float* weights) const {
    for (int64_t i = 0; i < a.top_k; ++i) weights[i] = scores[chosen[i]];
    if (a.score == kSoftmaxOfChosen) weigh_by_softmax(weights);
    float sum = 0.0f;
    for (int64_t i = 0; i < a.top_k; ++i) sum += weights[i];
    for (int64_t i = 0; i < a.top_k; ++i) {
      const float weight = a.renormalise ? weights[i] / (sum + float(a.epsilon)) : weights[i];
      const float scaled = weight * float(a.scale);
      weights[i] = rounded(a.expert_scales ? scaled * a.expert_scales[chosen[i]] : scaled, a.rounding);
    }
  }

  void weigh_by_softmax(float* weights) const {
    float sum = 0.0f;
    float highest = -INFINITY;  // NOTE: with a correction, the first chosen need not have it
    for (int64_t i = 0; i < a.top_k; ++i) highest = std::fmax(highest, rounded(weights[i], a.rounding));
    for (int64_t i = 0; i < a.top_k; ++i) sum += weights[i] = std::exp(rounded(weights[i], a.rounding) - highest);
    for (int64_t i = 0; i < a.top_k; ++i) weights[i] = rounded(weights[i] / sum, a.rounding);
  }

  const ChooseExpertsArguments& a;
  const int64_t size_;  // of a row, in whole vectors
};

}  // namespace
}  // namespace tandem

using namespace tandem;

TANDEM_EXPORT void tandem_choose_experts(const ChooseExpertsArguments* a) {
  const Router router(*a);
  const double cost = double(a->n * a->num_experts) * (kScoreNs + kPickNs * double(a->top_k));
  Pool::run(a->n, split(a->n, cost, a->threads), [&](int64_t row, int64_t last) {
    for (; row < last; ++row) router.run(row);
  });
}
