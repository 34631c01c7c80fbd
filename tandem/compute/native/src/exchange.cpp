// Exchanges between ranks (`exchange.h`) as functions for Python; the stack calls them directly.
#include "calls.h"
#include "exchange.h"

using namespace tandem;

TANDEM_EXPORT void tandem_add_over_ranks(const AddOverRanksArguments* a) {
  Exchange exchange(a->group);
  const auto into = [&](auto* out) {
    using T = std::remove_pointer_t<decltype(out)>;
    exchange.add(static_cast<const float*>(a->node), static_cast<const T*>(a->bias), out, a->out_stride, a->m, a->n,
                 int(a->threads));
  };
  with_dtype(a->out_dtype, [&](auto tag) { into(static_cast<decltype(tag)*>(a->out)); });
}

TANDEM_EXPORT void tandem_join_over_ranks(const JoinOverRanksArguments* a) {
  Exchange(a->group).join(static_cast<const float*>(a->part), a->bounds, static_cast<float*>(a->out), a->m);
}

TANDEM_EXPORT void tandem_gather_over_ranks(const GatherOverRanksArguments* a) {
  Exchange(a->group).gather(static_cast<const char*>(a->part), static_cast<char*>(a->out), a->m, a->row_bytes);
}

TANDEM_EXPORT void tandem_send_to_rank(const PipeArguments* a) {
  Exchange(a->group).send(static_cast<const char*>(a->data), a->size);
}

TANDEM_EXPORT void tandem_receive_from_rank(const PipeArguments* a) {
  Exchange(a->group).receive(static_cast<char*>(a->data), a->size);
}

TANDEM_EXPORT void tandem_collect_over_ranks(const CollectOverRanksArguments* a) {
  with_dtype(a->out_dtype, [&](auto tag) {
    Exchange(a->group).collect(a->terms, a->owners, static_cast<decltype(tag)*>(a->out), a->m, a->k, a->n,
                               int(a->threads));
  });
}

TANDEM_EXPORT void tandem_await_rank(const AwaitRankArguments* a) { *a->size = Exchange(a->group).await_own(); }

TANDEM_EXPORT void tandem_publish_rank(const PublishRankArguments* a) { Exchange(a->group).publish_own(a->size); }
