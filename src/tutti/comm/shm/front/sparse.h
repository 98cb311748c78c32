// Sums of sparse tensors: everyone's indices and values are gathered and added, in the order of
// ranks, on every rank alike.
#pragma once

#include <vector>

#include <ATen/ATen.h>

namespace tutti {

// `gather(mine, outs)` is an all_gather, over when it returns.
template <class Gather>
void sum_sparse(const at::Tensor& tensor, int size, bool mean, Gather gather) {
    at::AutoDispatchBelowADInplaceOrView raw;
    at::Tensor mine = tensor.coalesce();
    // What must be alike, and how many elements there are, which need not be.
    std::vector<int64_t> about(mine.sizes().begin(), mine.sizes().end());
    about.push_back(mine.sparse_dim());
    about.push_back(static_cast<int64_t>(mine.scalar_type()));
    about.push_back(mine._nnz());
    at::Tensor card = at::tensor(about, at::kLong);
    std::vector<at::Tensor> cards, indices, values;
    for (int rank = 0; rank < size; ++rank) cards.push_back(at::empty_like(card));
    gather(card, cards);
    auto alike = card.slice(0, 0, -1);
    int64_t all = 0;
    for (int rank = 0; rank < size; ++rank) {
        TORCH_CHECK_VALUE(at::equal(cards[rank].slice(0, 0, -1), alike),
                          "shm all_reduce of sparse tensors: rank ", rank,
                          " has another shape, dtype or number of sparse dimensions");
        int64_t count = cards[rank][-1].item<int64_t>();
        auto shape = mine._values().sizes().vec();
        shape[0] = count;
        indices.push_back(at::empty({mine.sparse_dim(), count}, at::kLong));
        values.push_back(at::empty(shape, mine._values().options()));
        all += count;
    }
    if (all > 0) {
        gather(mine._indices().contiguous(), indices);
        gather(mine._values().contiguous(), values);
    }
    at::Tensor sum;
    for (int rank = 0; rank < size; ++rank) {
        auto part = at::_sparse_coo_tensor_unsafe(indices[rank], values[rank], mine.sizes(),
                                                  mine._values().options().layout(at::kSparse));
        sum = sum.defined() ? sum.add(part) : part;
    }
    if (mean) sum = sum.div(size);
    tensor.copy_(sum.coalesce());
}

}  // namespace tutti
